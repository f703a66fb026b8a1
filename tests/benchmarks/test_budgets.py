"""The page of budgets has all its rows for any outcome of its items; the figures are not checked here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import arrays, budgets, cluster, guarantees, hosts, processes, shuffle
from benchmarks.budgets import ITEMS, TABLES, Item, Outcome, Row, cells, page, run_item
from benchmarks.harness import Measurement, Unmeasured, at_most, exactly

ROOT = Path(__file__).resolve().parents[2]
RATIO = Row("item", "a call", "call", at_most(1.3))
VALUE = Row("item", "a start", "start", at_most(50, "value"), "ms")
COMMAND = "`python -m benchmarks.budgets item`"


def found(*measurements: Measurement) -> Outcome:
    return Outcome(measurements)


def printing(*measurements: Measurement, then: str = "pass") -> Item:
    """An item whose program prints `measurements` and then runs `then`."""
    lines = [json.dumps(measurement.plain()) for measurement in measurements]
    script = f"import sys\nfor line in {lines!r}: print(line, flush=True)\n{then}"
    return Item(("-c", script), 60)


CALL = Measurement("item", "call", 26.0, "us", 20.0, "the base", runs=6, statistic="least", spread=(26.0, 31.0))


def test_a_ratio_has_both_figures_and_the_spread() -> None:
    assert cells(RATIO, found(CALL)) == (
        "a call", "<= 1.3x", "1.30x: 26 us, 20 us (the base); least of 6", "26 us to 31 us", "holds", COMMAND
    )  # fmt: skip


def test_a_value_has_the_unit_of_its_measurement() -> None:
    measured = Measurement("item", "start", 51.0, "ms", runs=5, spread=(49.0, 60.0))
    assert cells(VALUE, found(measured)) == (
        "a start", "<= 50 ms", "51 ms; median of 5", "49 ms to 60 ms", "**missed**", COMMAND
    )  # fmt: skip
    assert cells(Row("item", "lost", "lost", exactly(0)), found(Measurement("item", "lost", 0, "")))[1:5] == (
        "== 0", "0", "", "holds"
    )  # fmt: skip


def test_a_row_that_was_not_measured_says_why() -> None:
    assert cells(VALUE, Outcome(problem="hosts need root")) == (
        "a start", "<= 50 ms", "hosts need root", "", "not measured", COMMAND
    )  # fmt: skip
    failed = Outcome(problem="ended with status 1:\n a | b", failed=True)
    assert cells(VALUE, failed)[2:5] == ("ended with status 1: a / b", "", "**error**")
    assert cells(VALUE, Outcome())[2:5] == ("the program has not measured it", "", "**error**")
    assert cells(RATIO, found(Measurement("item", "call", 26.0, "us")))[4] == "**error**"


def test_the_page_has_the_same_rows_whatever_was_found() -> None:
    rows = [row for _, rows in TABLES for row in rows]
    empty = page({}, ["- Machine: this one"]).splitlines()
    errors = page({name: Outcome(problem="no", failed=True) for name in ITEMS}, ["- Machine: this one"]).splitlines()
    assert len(empty) == len(errors)
    for row in rows:
        assert len([line for line in errors if line.startswith(f"| {row.what} | {row.limit('')} |")]) == 1
    assert errors[-1] == f"0 rows hold, 0 are missed, {len(rows)} are errors, 0 are not measured."
    assert all(line.count(" | ") == 5 for line in empty if line.startswith("| "))


def test_each_row_has_an_item_and_each_item_a_row() -> None:
    assert {row.item for _, rows in TABLES for row in rows} == set(ITEMS)
    assert {item.arguments[2] for item in ITEMS.values() if item.arguments[1] == "benchmarks.guarantees"} == set(
        guarantees.ITEMS
    )


def measured_by(item: str) -> set[str]:
    """The measurements that the rows of an item ask for."""
    return {row.measurement for _, rows in TABLES for row in rows if row.item == item}


def test_rows_ask_for_what_the_programs_call_it() -> None:
    """Those that are too long to run here: their names are made of the same sizes."""
    assert measured_by("numpy") == {
        f"{operation}, {label}"
        for label, nbytes in arrays.OPERANDS.items()
        for operation in arrays._operations(8)
        if operation != "np.sort" or nbytes <= arrays.MAX_SORT
    } | {"allocate and free 128 KiB"}
    many, (large, small) = hosts.HOSTS, hosts.BROADCAST
    assert measured_by("broadcast") == {
        f"{large} MiB to {many} hosts: leaves the owner",
        f"{small} MiB to {many} hosts, {hosts.LINK} each: leaves the owner",
        "bytes copied",
    }
    assert measured_by("shuffle") == {
        f"{mib:,} MiB, {measure}"
        for mib in shuffle.SIZES
        for measure in ("exchange", "copied by zcactor", "peak memory")
    }
    assert f"{cluster.NODES} nodes on one machine" in measured_by("cluster")
    assert f"idle shared actor, one of {processes.SHARED:,}" in measured_by("memory")


def test_rows_that_the_page_on_costs_names_are_there() -> None:
    text = (ROOT / "docs" / "explanation" / "costs.md").read_text()
    named = re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", text)
    rows = [row.what for _, rows in TABLES for row in rows]
    assert len(named) >= 12
    assert [name for name in named if not any(name in row for row in rows)] == []


def test_what_a_program_finds() -> None:
    outcome = run_item(printing(CALL), 60)
    assert (outcome.found, outcome.problem) == ({"call": CALL}, "")


def test_a_program_that_lacks_something_keeps_what_it_found() -> None:
    missing = json.dumps(Unmeasured("item", "start", "no Slurm").plain())
    outcome = run_item(printing(CALL, then=f"print({missing!r})"), 60)
    assert (outcome.found, outcome.failed) == ({"call": CALL}, False)
    assert cells(VALUE, outcome)[2:5] == ("no Slurm", "", "not measured")


def test_a_program_that_fails_keeps_what_it_found() -> None:
    outcome = run_item(printing(CALL, then="sys.exit('no such thing')"), 60)
    assert (outcome.found, outcome.failed) == ({"call": CALL}, True)
    assert outcome.problem == "ended with status 1: no such thing"


@pytest.mark.slow
def test_a_program_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "LEAST", 0.0)
    outcome = run_item(printing(then="import signal; signal.pause()"), 0.5)
    assert outcome.failed
    assert "took longer than" in outcome.problem


def test_items_that_are_not_run() -> None:
    assert run_item(Item((), 60, lambda: "no device"), 60).problem == "no device"
    assert "were over" in run_item(printing(CALL), 1).problem


def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One item succeeds beside two that find nothing: one base cannot be built, and one program fails."""

    def not_built(revision: str) -> None:
        raise subprocess.CalledProcessError(1, ["git"], stderr=f"no {revision}")

    monkeypatch.setattr(budgets, "built", not_built)
    monkeypatch.setattr(
        budgets,
        "ITEMS",
        {
            "ending": printing(Measurement("fake", "244 connections that end at once", 12.0, "ms")),
            "calls": Item((), 60, needs_base=True),
            "stale": printing(then="sys.exit('it broke')"),
        },
    )
    path = tmp_path / "page.md"
    assert program.main(["--markdown", "--out", str(path)]) == 1
    text = path.read_text()
    assert "| <= 50 ms | 12 ms |  | holds |" in text
    assert "was not built: no " in text and "ended with status 1: it broke" in text
    for known in ("- Machine: ", "- Commit: ", "- Date: ", f"Python {sys.version.split()[0]}"):
        assert known in text
    about, *lines = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert about["machine"]["python"] == sys.version.split()[0]
    assert [(line["item"], line["value"], line["unit"]) for line in lines] == [("fake", 12.0, "ms")]


def test_rows_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measured = Measurement("fake", "244 connections that end at once", 12.0, "ms")
    monkeypatch.setitem(budgets.ITEMS, "ending", printing(measured))
    assert budgets.main(["ending"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ending", "registering", "stale", "sockets", "memory", "death", "leaks"])
def test_items_measure_what_the_rows_ask_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert budgets.main([name]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows
    assert all("holds" in row or "missed" in row for row in rows)
