"""`zcactor.sizes`: texts that are sizes, and texts that are not."""

from __future__ import annotations

import pytest

from zcactor.sizes import size, sized


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("12", 12),
        ("1.5KiB", 1536),
        ("256MiB", 256 << 20),
        ("1 GB", 10**9),
        ("2gib", 2 << 30),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize("text", ["", "many", "-1", "1PiB", "1i"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size: write for instance 256MiB"):
        size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"), (1, "1 byte"), (1023, "1,023 bytes"), (1024, "1 KiB"), (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1 MiB"), ((1 << 20) - 100, "1023.9 KiB"), (1 << 50, "1024 TiB"),
    ],
)  # fmt: skip
def test_sizes_as_text(nbytes: int, text: str) -> None:
    assert sized(nbytes) == text
