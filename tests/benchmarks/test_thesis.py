"""The three ways run and their copies are counted; the times are not checked, because tests run beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import thesis
from benchmarks.budget_rows import ITEMS, THREE_WAYS
from benchmarks.harness import Measurement, Scale
from benchmarks.paths.models import MODELS
from tests.hosts.netns import missing

WAYS = ("encode", "private buffers", "zero copy")


@pytest.mark.slow
@pytest.mark.parametrize(
    "medium",
    [
        "local",
        "tcp",
        pytest.param(
            "veth",
            marks=[pytest.mark.root, pytest.mark.skipif(missing() is not None, reason=str(missing()))],
        ),
    ],
)
def test_times_and_copies(
    medium: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thesis, "SIZES", (thesis.MIB,))
    monkeypatch.setattr(thesis, "COUNTED_NBYTES", 4 * thesis.MIB)
    monkeypatch.setattr(thesis, "MODELS", {"Inception": MODELS["Inception"]})
    monkeypatch.setattr(thesis, "QUICK", Scale(1, 0.01))
    path = tmp_path / "figures"
    assert thesis.main([medium, "--quick", "--markdown", "--json", str(path)]) == 0
    found = [Measurement.from_plain(json.loads(line)) for line in path.read_text().splitlines()]
    times = [m for m in found if m.unit == "ms"]
    assert [m.name for m in times] == [
        f"{medium}, {what}, {way}" for what in ("1 MiB", "Inception step") for way in WAYS
    ]
    assert all(m.value > 0 for m in times)
    encoded, private, zero_copy = (m.value for m in found if "copies" in m.name)
    assert (encoded >= 3.9, private, zero_copy) == (True, 2, 0)
    output = capsys.readouterr().out
    assert "| *the thesis* | 2.43x | 1.21x |" in output
    assert f"| {medium}, 1 MiB |" in output


def test_rows_have_floors_and_budgets() -> None:
    copies = [{"what": thesis.COPIED, "way": way, "values": [n]} for way, n in zip(WAYS, (5, 2.5, 0), strict=True)]
    found = thesis.rows("tcp", copies + [
        {"what": what, "way": way, "values": [value, value + 2, value + 4]}
        for what in (64 << 10, 16 << 20, "AlexNet")
        for way, value in zip(WAYS, (7, 3, 1), strict=True)
    ])  # fmt: skip
    assert [(m.name, m.value, m.floor, m.verdict) for m in found] == [
        ("tcp, encode: copies of each byte", 5, None, "pass"),
        ("tcp, private buffers: copies of each byte", 2.5, None, "FAIL"),
        ("tcp, zero copy: copies of each byte", 0, None, "pass"),
        ("tcp, 64 KiB, encode", 9, None, ""),
        ("tcp, 64 KiB, private buffers", 5, 9, ""),
        ("tcp, 64 KiB, zero copy", 3, 5, ""),
        ("tcp, 16 MiB, encode", 9, None, ""),
        ("tcp, 16 MiB, private buffers", 5, 9, "pass"),
        ("tcp, 16 MiB, zero copy", 3, 5, "pass"),
        ("tcp, AlexNet step, encode", 9, None, ""),
        ("tcp, AlexNet step, private buffers", 5, 9, "pass"),
        ("tcp, AlexNet step, zero copy", 3, 5, "pass"),
    ]
    assert thesis.beside(found).splitlines()[2:] == [
        "| *the thesis* | 2.43x | 1.21x |",
        "| tcp, 64 KiB | 3.00x | 1.67x |",
        "| tcp, 16 MiB | 3.00x | 1.67x |",
        "| tcp, AlexNet step | 3.00x | 1.67x |",
    ]


def test_rows_of_the_page_ask_for_what_the_program_calls_it() -> None:
    sizes = {thesis.named(nbytes) for nbytes in (*thesis.SIZES, *thesis.GUEST_SIZES)}
    sizes |= {thesis.named(model) for model in MODELS}
    for row in THREE_WAYS:
        medium, _, rest = row.measurement.partition(", ")
        assert medium in ITEMS[row.item].arguments
        assert rest in {f"{way}: copies of each byte" for way in WAYS} or rest.rpartition(", ")[0] in sizes


def test_a_medium_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(thesis, "missing", lambda: "no hosts here")
    monkeypatch.setattr(thesis, "device", lambda: "")
    monkeypatch.setattr(thesis, "no_guest", lambda: "no guests here")
    assert thesis.main(["veth", "rxe"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "veth is left out: no hosts here", "rxe is left out: no guests here"
    ]  # fmt: skip


def test_an_unknown_medium(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        thesis.main(["pigeon"])
    assert "there is no medium 'pigeon'" in capsys.readouterr().err
