"""The measures of a group over four hosts run, and copy nothing; their rates are not checked, because tests run beside
each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import group_hosts
from benchmarks.harness import Scale
from tests.hosts.netns import missing


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_group_over_four_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_hosts, "SIZES", (1, 4))
    monkeypatch.setattr(group_hosts, "QUICK", Scale(1, 0.01))
    path = tmp_path / "figures"
    assert group_hosts.main(["--quick", "--json", str(path)]) == 0
    figures = [json.loads(line) for line in path.read_text().splitlines()]
    assert [figure["name"] for figure in figures if figure["value"] == 0] == [
        "bytes copied for 1 MiB", "bytes copied for 4 MiB",
    ]  # fmt: skip
    assert all(figure["value"] > 0 and figure["floor"] > 0 for figure in figures if figure["floor"] is not None)
    assert "reduce_scatter of 4 MiB over 4 hosts" in capsys.readouterr().out


def test_where_there_can_be_no_hosts_it_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(group_hosts, "missing", lambda: "no hosts here")
    assert group_hosts.main(["--quick"]) == 2
    assert capsys.readouterr().err == "no hosts here\n"
