"""Two sides are measured in turns; the figures are not checked here."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from benchmarks import paired


@pytest.mark.slow
@pytest.mark.parametrize("way", paired.WAYS)
def test_every_item_is_measured_on_both_sides(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few: Mapping[str, tuple[str, int]] = {item: (name, 1000 if item == "pipelined" else 40 if item == "array" else 2)
                                          for item, (name, _) in paired.ITEMS.items()}  # fmt: skip
    monkeypatch.setattr(paired, "ITEMS", few)
    found = paired.compare(paired.ROOT, way, list(few), rounds=1, times=1)
    assert [measurement.name for measurement in found] == [f"{name}, {way}" for name, _ in few.values()]
    assert all(measurement.value > 0 and measurement.floor for measurement in found)


def test_an_unknown_item_and_a_missing_base(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        paired.main(["--base", "HEAD", "syncs"])
    assert "there is no item 'syncs'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        paired.main(["sync"])
    assert "--base" in capsys.readouterr().err


def test_a_revision_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert paired.main(["--base", "no-such-revision"]) == 2
    assert "no-such-revision" in capsys.readouterr().err
