"""The measures of ``--capacity``, and their text."""

from __future__ import annotations

import json

import pytest

from simulation import capacity
from simulation.command import main


@pytest.mark.slow
def test_a_line_for_each_size(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_ROUNDS", 1)
    assert main(["--capacity", "spawn", "--nodes", "1,3", "--json"]) == 0
    one, three = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert list(one) == ["what", "nodes", "spawns", "head_us", "all_us"]
    assert (one["what"], one["nodes"], three["nodes"]) == ("spawn", 1, 3)
    for line in (one, three):
        assert line["spawns"] > 100
        assert 0 < line["head_us"] < line["all_us"]
    assert main(["--capacity", "spawn", "--nodes", "1"]) == 0
    assert capsys.readouterr().out.startswith("spawn at 1 nodes: ")
