"""`zcactor.cluster.yaml_text`, read back by a YAML parser."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from zcactor.cluster.yaml_text import yaml_text

TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    [
        "yes",
        "No",
        "~",
        "null",
        "1e3",
        "0x1f",
        "12:30",
        "a: b",
        "- a",
        "# no",
        "'",
        "%a",
        "&a",
        "*a",
        "\x85",
        "\u2028",
        "😀",
    ]
)
VALUES = st.recursive(
    TEXT | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(TEXT, VALUES, min_size=1, max_size=4), max_size=3))
def test_what_is_written_is_read_back(documents: list[dict[str, Any]]) -> None:
    text = yaml_text(documents)
    assert text.isascii()
    assert list(yaml.safe_load_all(text)) == documents


@pytest.mark.parametrize("length", [900, 998, 999, 1_022, 5_000])
@pytest.mark.parametrize("value", ["x", {}, [], {"a": "x"}, ["x", {"b": 1}]])
def test_long_keys(length: int, value: Any) -> None:
    """Readers look for the colon behind a key in its first 1,024 characters."""
    key = "k " * (length // 2)
    for document in ({key: value, "z": 1}, {"list": [{key: value, "z": 1}], key: {key: value}}):
        assert list(yaml.safe_load_all(yaml_text([document]))) == [document]


def test_how_it_looks() -> None:
    document = {"kind": "Job", "count": 2, "none": {}, "list": [{"a": "x", "b": ["1", True]}, [], ["deep"]]}
    assert yaml_text([document]) == (
        '---\nkind: Job\ncount: 2\nnone: {}\nlist:\n  - a: x\n    b:\n      - "1"\n      - true\n  - []\n  - - deep\n'
    )


@pytest.mark.parametrize("value", [1.5, None, b"", ("a",)])
def test_other_types(value: object) -> None:
    with pytest.raises(TypeError, match="YAML text is made of plain data only"):
        yaml_text([{"a": value}])
