"""The measures of two hosts run; their budgets are not checked, because tests run beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import hosts
from benchmarks.harness import Scale
from tests.hosts.netns import missing


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_calls_and_pulls(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "SIZES", (1, 64))
    monkeypatch.setattr(hosts, "QUICK", Scale(1, 0.01))
    path = tmp_path / "figures"
    assert hosts.main(["--quick", "--markdown", "--json", str(path)]) == 0
    figures = [json.loads(line) for line in path.read_text().splitlines()]
    assert [figure["value"] for figure in figures if "copied" in figure["name"]] == [0, 0]
    assert all(figure["value"] > 0 and figure["floor"] > 0 for figure in figures if "copied" not in figure["name"])
    output = capsys.readouterr().out
    assert "| pull of 64 MiB |" in output and "budgets hold" in output


def test_where_there_can_be_no_hosts_it_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hosts, "missing", lambda: "no hosts here")
    assert hosts.main(["--quick"]) == 2
    assert capsys.readouterr().err == "no hosts here\n"
