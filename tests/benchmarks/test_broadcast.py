"""The measures of a broadcast run, and the owner sends no more than it may; their durations are not checked here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import broadcast
from benchmarks.harness import Scale
from tests.hosts.netns import missing


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_who_sends_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "HOSTS", 4)
    monkeypatch.setattr(broadcast, "SIZES", (8, 1))
    monkeypatch.setattr(broadcast, "QUICK", Scale(1, 0.01))
    path = tmp_path / "figures"
    assert broadcast.main(["--quick", "--strict", "--markdown", "--json", str(path)]) == 0
    figures = [json.loads(line) for line in path.read_text().splitlines()]
    assert [figure["value"] for figure in figures if "leaves" in figure["name"]] == [2, 2]
    assert all(figure["value"] > 0 for figure in figures if figure["floor"] is not None)
    assert "3 of 3 budgets hold" in capsys.readouterr().out


def test_where_there_can_be_no_hosts_it_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(broadcast, "missing", lambda: "no hosts here")
    assert broadcast.main(["--quick"]) == 2
    assert capsys.readouterr().err == "no hosts here\n"
