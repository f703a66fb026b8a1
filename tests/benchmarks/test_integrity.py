"""The figures about authenticated arrays: all of them are present, from pulls in every mode."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks import integrity


@pytest.mark.slow
def test_the_table_is_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(integrity, "SIZES", integrity.SIZES[:2])
    monkeypatch.setattr(sys, "argv", ["benchmarks.integrity", "--seconds", "0.001"])
    integrity.main()
    shown = capsys.readouterr().out
    for name in integrity.primitives():
        assert re.search(rf"^\| {name} \| [0-9.]+ \|$", shown, re.MULTILINE)
    for name, _ in integrity.SIZES:
        assert re.search(rf"^\| {name} \|( [0-9]+\.[0-9]+ \|){{{len(integrity.MODES)}}}$", shown, re.MULTILINE)
