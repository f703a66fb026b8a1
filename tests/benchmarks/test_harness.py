"""The pure parts of the benchmarks, and one benchmark with tiny counts from the command line to the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.__main__ import main, parse
from benchmarks.harness import (
    Budget,
    Measurement,
    Scale,
    at_least,
    at_most,
    exactly,
    interleave,
    markdown,
    median_round,
    medians,
    number,
    plain_table,
)

ROOT = Path(__file__).resolve().parents[2]
CALL = Measurement("latency", "call", 30.0, "us", 12.0, "echo", at_most(3), 5)


@pytest.mark.parametrize(
    ("budget", "value", "floor", "verdict"),
    [
        (at_most(3), 36.0, 12.0, "pass"),
        (at_most(3), 36.1, 12.0, "FAIL"),
        (at_most(20, "value"), 20.0, 1.0, "pass"),
        (at_most(20, "value"), 21.0, 100.0, "FAIL"),
        (at_least(0.35), 350.0, 1000.0, "pass"),
        (at_least(0.35), 349.0, 1000.0, "FAIL"),
        (exactly(0), 0.0, 0.0, "pass"),
        (exactly(0), 1.0, 0.0, "FAIL"),
        (at_most(2), 1.0, None, "FAIL"),
        (None, 1.0, 1.0, ""),
    ],
)
def test_verdict_compares_value_or_ratio(
    budget: Budget | None, value: float, floor: float | None, verdict: str
) -> None:
    measurement = Measurement("item", "name", value, "us", floor, "floor", budget)
    assert measurement.verdict == verdict


def test_measurement_survives_the_file() -> None:
    plain = json.loads(json.dumps(CALL.plain()))
    assert plain["ratio"] == 2.5
    assert plain["verdict"] == "pass"
    assert Measurement.from_plain(plain) == CALL
    assert Measurement.from_plain(Measurement("a", "b", 1.0, "").plain()) == Measurement("a", "b", 1.0, "")


def test_scale_keeps_the_least() -> None:
    scale = Scale(3, 0.01)
    assert scale.count(1000) == 10
    assert scale.count(30, least=5) == 5
    assert scale.count(1) == 1


@pytest.mark.slow
async def test_interleave_begins_each_turn_with_another_subject() -> None:
    order: list[str] = []

    async def sample(name: str) -> float:
        order.append(name)
        return float(len(order))

    figures = await interleave(2, {"a": lambda: sample("a"), "b": lambda: sample("b")})
    assert order == ["a", "b", "a", "b", "b", "a"]  # the first two warm up
    assert figures == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
    assert medians(figures) == {"a": 4.5, "b": 4.5}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.4567, "0.457"), (12.34, "12.3"), (99.99, "100"), (456.7, "457"), (1 << 30, "1,073,741,824")],
)
def test_number_has_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_tables_show_value_floor_ratio_and_verdict() -> None:
    no_budget = Measurement("leaks", "rate", 1234.0, "refs/s")
    lines = plain_table("Title", [CALL, no_budget]).splitlines()
    assert lines[0] == "Title"
    assert lines[2].split() == ["call", "30", "us", "12", "us", "(echo)", "2.50x", "<=", "3x", "pass"]
    assert lines[3].split() == ["rate", "1,234", "refs/s"]
    assert markdown([CALL, no_budget]).splitlines()[2:] == ["| call | 30 us | 12 us (echo) | 2.50x | <= 3x | pass |"]


def test_unknown_items_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["latencies"])
    assert "there is no 'latencies'" in capsys.readouterr().err


def test_a_file_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Measurement("latency", "slow call", 99.0, "us", 12.0, "echo", at_most(3), 5)
    path = tmp_path / "figures.jsonl"
    lines: list[dict[str, object]] = [{"machine": {}}, CALL.plain(), slow.plain()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["--read", str(path), "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert "| slow call | 99 us | 12 us (echo) | 8.25x | <= 3x | FAIL |" in shown
    assert "1 of 2 budgets hold" in shown
    assert main(["--read", str(path), "--strict"]) == 1


def run(item: str, path: Path) -> tuple[dict[str, object], list[Measurement]]:
    """Run an item with tiny counts: the first line of its file, and its measurements."""
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        item,
        "--quick",
        "--runs",
        "1",
        "--share",
        "0.01",
        "--json",
        str(path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    about, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    return about, [Measurement.from_plain(line) for line in lines]


@pytest.mark.slow
def test_a_benchmark_runs_from_the_command_line_to_the_file(tmp_path: Path) -> None:
    about, (death,) = run("death", tmp_path / "figures.jsonl")
    assert about["quick"] is True
    assert str(about["command"]).startswith("python -m benchmarks death --quick")
    assert death.name == "SIGKILL to ActorDied"
    assert death.value > 0
    assert death.floor is not None


@pytest.mark.slow
def test_peers_are_measured_where_they_are_installed(tmp_path: Path) -> None:
    _, measured = run("peers", tmp_path / "peers.jsonl")
    installed = [name for name in peers.LIBRARIES if not peers.missing(name)]
    rows = [title for title, _ in peers.ROWS.values() if title != "array of 1 GiB"]
    assert {"zcactor", "multiprocessing"} <= set(installed)
    assert [each.name for each in measured] == [f"{row}: {name}" for row in rows for name in installed]
    assert all(each.value > 0 for each in measured)


@pytest.mark.parametrize(
    ("values", "floors", "found"),
    [
        ([3.0], [2.0], (3.0, 2.0)),
        ([1.0, 90.0, 4.0], [1.0, 30.0, 2.0], (4.0, 2.0)),
        ([4.0, 1.0], [1.0, 1.0], (1.0, 1.0)),
    ],
)
def test_the_round_of_the_median_ratio_counts(
    values: list[float], floors: list[float], found: tuple[float, float]
) -> None:
    assert median_round(values, floors) == found
