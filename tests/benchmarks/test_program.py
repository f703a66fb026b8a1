"""The options and the exit status of a benchmark program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness import Measurement, at_most
from benchmarks.program import options_of, report

FOUND = [
    Measurement("item", "held", 1.0, "s", budget=at_most(2, "value")),
    Measurement("item", "missed", 3.0, "s", budget=at_most(2, "value")),
    Measurement("item", "without", 9.0, "s"),
]


@pytest.mark.parametrize(("strict", "status"), [([], 0), (["--strict"], 1)])
def test_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], strict: list[str], status: int) -> None:
    path = tmp_path / "figures"
    options = options_of("benchmarks.item", "An item.").parse_args(["--json", str(path), "--markdown", *strict])
    assert report(options, FOUND) == status
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == ["held", "missed", "without"]
    shown = capsys.readouterr().out
    assert "1 of 2 budgets hold" in shown
    assert "| missed |" in shown and "| without |" not in shown


def test_all_budgets_hold(capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of("benchmarks.item", "An item.").parse_args(["--strict"])
    assert not options.quick
    assert report(options, FOUND[:1]) == 0
    assert capsys.readouterr().out == "1 of 1 budgets hold\n"


def test_unknown_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of("benchmarks.item", "An item.").parse_args(["--fast"])
    assert "python -m benchmarks.item: error: unrecognized arguments: --fast" in capsys.readouterr().err
