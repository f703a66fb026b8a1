"""The command line: its words, its output, and one run for one seed in any environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from simulation import command
from simulation.command import main
from simulation.schedule import draw
from simulation.trace import Trace
from simulation.workloads.calls import Calls
from zcactor.rpc.messages import Kind

SHORT = ("--nodes", "3", "--duration", "3")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refusal(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that refuses a command line."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert not said.out
    (line,) = said.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--seed --seeds --schedule --capacity is required"),
        (["--seed", "x"], "'x', it must be a whole number"),
        (["--seed", "-1"], "-1, 0 to"),
        (["--seed", "1", "--seeds", "1:2"], "not allowed with"),
        (["--seeds", "5"], "'5' is no range of seeds"),
        (["--seeds", ":"], "'', it must be a whole number"),
        (["--seeds", "2:1"], "the range 2:1 is empty"),
        (["--seed", "1", "--nodes", "0"], "0, 1 to 4096 are possible"),
        (["--seed", "1", "--nodes", "5000"], "5000, 1 to 4096 are possible"),
        (["--seed", "1", "--duration", "nan"], "nan, 0.01 to 1e+06 are possible"),
        (["--seed", "1", "--duration", "0"], "0, 0.01 to 1e+06 are possible"),
        (["--seed", "1", "--workloads", "calls,dances"], "unknown workload 'dances'; there are broadcast, calls"),
        (["--seed", "1", "--jobs", "0"], "0, 1 to 256 are possible"),
        (["--seed", "1", "--budget", "x"], "'x', it must be a number"),
        (["--seed", "1", "--only", "h1"], "--only says which events are written"),
        (["--seeds", "1:2", "--trace", "t"], "--trace is for one run"),
        (["--seeds", "1:2", "--chrome", "t"], "--chrome is for one run"),
        (["--seed", "1", "--trace", "/nowhere/t"], "--trace /nowhere/t: No such file or directory"),
        (["--seed", "1", "--chrome", "/nowhere/t"], "--chrome /nowhere/t: No such file or directory"),
        (["--seed", "1", "--wire", "copper"], "invalid choice: 'copper' (choose from 'mixed', 'python', 'native')"),
        (["--seed", "1", "--speed", "2"], "unrecognized arguments: --speed 2"),
        (["--seed", "1", "--nodes", "4,5"], "--nodes takes one number, and several beside --capacity alone"),
        (["--capacity", "flight"], "invalid choice: 'flight' (choose from 'spawn')"),
        (["--capacity", "spawn", "--nodes", "4,0"], "0, 1 to 4096 are possible"),
        (["--capacity", "spawn", "--wire", "native"], "--wire is for runs"),
        (["--schedule", "/nowhere/s.toml"], "/nowhere/s.toml: No such file or directory"),
        (["--schedule", "s.toml", "--nodes", "4"], "--nodes is the schedule's own"),
        (["--schedule", "s.toml", "--wire", "mixed"], "--wire is the schedule's own"),
    ],
)
def test_wrong_words_are_refused_in_one_line(
    words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(words, capsys)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[: text.index("nodes") + 3], "no schedule"),
        (lambda text: text.replace("version = 1", "version = 2"), "version is 2, this program reads 1"),
        (lambda text: text.replace('["h', '["g', 1), "a fault names host 'g"),
        (lambda text: text.replace("nodes = 6", "nodes = 5000"), "nodes is 5000, 1 to 4096 are possible"),
        (lambda text: text.replace('["calls"]', '["dances"]'), "unknown workload 'dances'"),
        (lambda text: text.replace('kind = "', 'kind = "un'), "unknown fault 'un"),
        (
            lambda text: text.replace('"jump"', '"head"'),
            "a fault 'head' is of ['h0'], in a cluster of two nodes or more",
        ),
        (lambda text: text.replace('wire = "', 'wire = "un'), "unknown wire 'unpython'; there are python, native"),
        (lambda text: text.replace("recv_depth", "depth"), "unexpected keyword argument 'depth'"),
        (lambda text: text.replace("seed = ", "sed = "), "sed"),
        (lambda _: "\0", "no schedule"),
    ],
)
def test_schedules_that_cannot_be_played(
    change: Callable[[str], str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.toml"
    good = draw(1, 6, 30.0, ("calls",), ("calls",)).text()
    assert change(good) != good
    path.write_text(change(good))
    assert said in refusal(["--schedule", str(path)], capsys)


@pytest.mark.parametrize(
    "words",
    [
        ("--trace", "/dev/full", "--chrome"),
        ("--chrome", "/dev/full", "--trace"),
        ("--only", "h1", "--trace", "/dev/full", "--chrome"),
        ("--only", "unknown", "--chrome", "/dev/full", "--trace"),
    ],
)
def test_events_that_a_full_disk_does_not_take_are_told_in_one_line(
    words: Sequence[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = ("--seed", "1", "--nodes", "2", "--duration", "0.1", "--workloads", "calls")
    said = refusal([*run, *words, str(tmp_path / "other")], capsys)
    assert f"{words[-3]} /dev/full: No space left on device; the events are not all there" in said
    assert (tmp_path / "other").read_text() or "unknown" in words


@pytest.mark.slow
def test_a_line_for_a_seed_and_one_at_the_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    chrome = tmp_path / "chrome"
    files = "--trace", str(trace), "--chrome", str(chrome)
    assert main(["--seed", "3", *SHORT, "--workloads", "calls", "--json", *files]) == 0
    line, summary = lines(capsys)
    assert list(line) == [
        "seed", "nodes", "ok", "digest", "events", "messages", "calls", "virtual_s", "cpu_s", "commit", "config",
        "outcomes", "sometimes", "faults", "broken",
    ]  # fmt: skip
    assert (line["seed"], line["nodes"], line["ok"], line["broken"]) == (3, 3, True, [])
    assert line["calls"] == sum(line["outcomes"].values()) > 10
    assert list(summary) == ["summary", "seeds", "failed", "wall_s"]
    assert (summary["summary"], summary["seeds"], summary["failed"]) == (True, 1, [])
    written = trace.read_text().splitlines()
    again = Trace()
    again._hash.update(trace.read_bytes())
    assert again.digest == line["digest"]
    events = [json.loads(event) for event in written]
    times = [event["t"] for event in events]
    assert times == sorted(times)
    assert sum(event["ph"] != "M" for event in json.loads(chrome.read_text())) == len(events)
    frames = {frame.split()[0] for event in events for frame in event.get("frames", ())}
    assert {"HELLO", "CALL", "RESPONSE"} <= frames <= set(Kind.__members__)


@pytest.mark.slow
def test_the_wire(capsys: pytest.CaptureFixture[str]) -> None:
    played = []
    for words in (["--wire", "native"], ["--wire", "native"], ["--wire", "python"], []):
        assert main(["--seed", "7", *SHORT, "--workloads", "calls", "--json", *words]) == 0
        played.append(lines(capsys)[0])
    assert [line["config"]["wire"] for line in played] == ["native", "native", "python", "python"]
    first, again, python, mixed = (line["digest"] for line in played)
    assert first == again != python == mixed


@pytest.mark.slow
def test_seeds_bounds_included_and_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "7:8", *SHORT]) == 0
    first, second, end = capsys.readouterr().out.splitlines()
    assert first.startswith("seed 7: ") and second.startswith("seed 8: ")
    assert end.startswith("2 seeds in ") and end.endswith(" 0 failed")
    assert main(["--seeds", "1:50", *SHORT, "--budget", "0.01", "--json"]) == 0
    assert lines(capsys)[-1]["seeds"] == 1


async def _raises(_: Calls) -> None:
    raise KeyError("a defect of the program")


async def _never_ends(_: Calls) -> None:
    import asyncio

    await asyncio.get_running_loop().create_future()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "invariant", "said"),
    [(_raises, "I11", "a defect of the program"), (_never_ends, "I10", "has not come to rest within 60 s")],
)
def test_a_program_that_fails(
    run: Any, invariant: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(Calls, "run", run)
    monkeypatch.chdir(tmp_path)
    assert main(["--seeds", "4:9", *SHORT, "--workloads", "calls", "--fail-fast", "--shrink"]) == 1
    out = capsys.readouterr().out
    assert "seed 4 of commit" in out
    assert f"  {invariant} at " in out
    assert said in out
    assert "repeat it by: python -m simulation --seed 4 --nodes 3 --duration 3 --workloads calls" in out
    assert out.splitlines()[-1].endswith("1 failed: 4")
    assert main(["--schedule", "4.toml", "--json"]) == 1
    line, _ = lines(capsys)
    assert [broken["invariant"] for broken in line["broken"]] == [invariant]
    assert line["faults"] == []


@pytest.mark.slow
def test_what_blocks_the_thread_is_named(tmp_path: Path) -> None:
    program = tmp_path / "blocks.py"
    program.write_text(
        "import threading\n"
        "from simulation import command\n"
        "from simulation.workloads.calls import Calls\n"
        "async def blocks(self):\n"
        "    threading.Event().wait()\n"
        "command.BLOCKED = 5.0\n"
        "Calls.run = blocks\n"
        "command.main(['--seed', '1', '--nodes', '2', '--duration', '1', '--workloads', 'calls'])\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "process driver@h0 has blocked the thread for 5 s" in done.stderr
    assert command.BLOCKED == 60.0


@pytest.mark.slow
@pytest.mark.timeout(300)  # three interpreters in a row, and their child processes
def test_one_seed_is_one_run(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]

    def played(hash_seed: str, jobs: str, directory: Path, zone: str, root: Path = root) -> list[str]:
        words = ["--seeds", "11:12", *SHORT, "--json", "--jobs", jobs]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "TZ": zone}
        done = subprocess.run(
            [sys.executable, "-m", "simulation", *words], capture_output=True, text=True, timeout=95,
            check=True, cwd=directory, env={**environment, "PYTHONPATH": str(root)},
        )  # fmt: skip
        return [line["digest"] for line in map(json.loads, done.stdout.splitlines()) if "digest" in line]

    expected = played("0", "1", root, "UTC")
    assert len(set(expected)) == 2
    assert played("1", "2", tmp_path, "Asia/Tokyo") == expected
    elsewhere = tmp_path / "where the path of each source file is longer"
    shutil.copytree(root / "zcactor", elsewhere / "zcactor", ignore=shutil.ignore_patterns("__pycache__"))
    assert played("4711", "1", tmp_path, "UTC", elsewhere) == expected


@pytest.mark.slow
def test_what_is_on_the_heap_before_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def digest() -> str:
        main(["--seed", "12", *SHORT, "--json"])
        found: str = lines(capsys)[0]["digest"]
        return found

    first = digest()
    kept = [[object() for _ in range(number % 100)] for number in range(5000)]
    assert digest() == first
    del kept
