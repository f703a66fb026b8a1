"""The command line: ``python -m simulation``."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from simulation.capacity import STEPS, measure
from simulation.run import Run, set_apart
from simulation.schedule import WIRES, BadSchedule, Schedule, draw
from simulation.trace import Trace
from simulation.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from _typeshed import SupportsWrite

    from simulation.schedule import Fault

__all__ = ["RUNS", "ChromeFile", "command_line", "main", "shrink"]


# Hosts are the file's processes and simulated processes its threads, each with a bar from its birth to its end. Every
# other event is a mark on its process's line. (Format: "Trace Event Format", the Chromium project.)
class ChromeFile:
    """A file with the events of a run.

    Args:
        file: opened for text; `close` leaves it open.
    """

    def __init__(self, file: SupportsWrite[str]) -> None:
        self._file = file
        self._hosts: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._separator = "[\n"

    def take(self, line: str) -> None:
        """Write the event of one line of a trace."""
        event = json.loads(line)
        time, place, kind = event.pop("t"), event.pop("p"), event.pop("k")
        phase = {"born": "B", "end": "E"}.get(kind, "i")
        where = self._where(place)
        name = "lives" if phase != "i" else kind
        self._write({"ph": phase, "name": name, "ts": round(time * 1e6, 3), **where, "args": event})

    def _where(self, place: str) -> dict[str, int]:
        """The numbers that stand for a process, which gets its name in the file at its first event."""
        name, _, host = place.rpartition("@")
        if host not in self._hosts:
            self._hosts[host] = len(self._hosts) + 1
            self._name("process_name", host, {"pid": self._hosts[host], "tid": 0})
        where = {"pid": self._hosts[host], "tid": self._places.get(place, len(self._places) + 1)}
        if place not in self._places:
            self._places[place] = where["tid"]
            self._name("thread_name", name or host, where)
        return where

    def _name(self, what: str, name: str, where: dict[str, int]) -> None:
        self._write({"ph": "M", "name": what, **where, "args": {"name": name}})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(self._separator + json.dumps(event))
        self._separator = ",\n"

    def close(self) -> None:
        """Write the end of the file."""
        self._file.write("\n]\n" if self._hosts else "[]\n")


RUNS: Final = 200
"""Runs that a search may take."""


class _Search:
    """A search: it counts the runs, and remembers the smallest schedule so far."""

    def __init__(self, schedule: Schedule, breaks: Callable[[Schedule], bool], runs: int) -> None:
        self.best = schedule
        self._breaks = breaks
        self._left = runs

    def take(self, smaller: Schedule) -> bool:
        """Whether `smaller` breaks the invariant as well; then the search goes on with it."""
        if self._left <= 0 or smaller == self.best:
            return False
        self._left -= 1
        if self._breaks(smaller):
            self.best = smaller
            return True
        return False


# Zeller's delta debugging.
def shrink(schedule: Schedule, breaks: Callable[[Schedule], bool], runs: int = RUNS) -> Schedule:
    """The smallest schedule found that still breaks: fewer faults, then fewer nodes, then a shorter time.

    Args:
        schedule: a schedule that breaks an invariant.
        breaks: plays a schedule and tells whether it breaks in the same way.
        runs: how often `breaks` may be called.
    """
    search = _Search(schedule, breaks, runs)
    if not search.take(replace(schedule, faults=())):
        _drop_faults(search)
    _drop_nodes(search)
    while search.best.duration > 0.5 and search.take(_shorter(search.best)):
        pass
    _drop_faults(search)
    return search.best


def _drop_faults(search: _Search) -> None:
    parts = 2
    while len(search.best.faults) >= 1:
        faults = search.best.faults
        size = -(-len(faults) // parts)
        for at in range(0, len(faults), size):
            rest: tuple[Fault, ...] = faults[:at] + faults[at + size :]
            if search.take(replace(search.best, faults=rest)):
                parts = max(parts - 1, 2)
                break
        else:
            if size <= 1:
                return
            parts = min(2 * parts, len(faults))


def _drop_nodes(search: _Search) -> None:
    needed = 1 + max((int(host[1:]) for fault in search.best.faults for host in fault.who), default=0)
    for nodes in sorted({needed, 2, 3, (needed + search.best.nodes) // 2}):
        if needed <= nodes < search.best.nodes and search.take(replace(search.best, nodes=nodes)):
            return


def _shorter(schedule: Schedule) -> Schedule:
    """The same schedule in half of the time, but late enough for its last fault."""
    last = max((fault.at for fault in schedule.faults), default=0.0)
    return replace(schedule, duration=round(max(schedule.duration / 2, last), 3))


BLOCKED: Final = 60.0
"""Seconds of wall time that one turn of one process may take: after them it counts as blocked."""
_SHOWN: Final = 30
"""Events in the report of a failure."""
_PLACE: Final = re.compile(r"[\w.]+@h\d+")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _number(name: str, convert: Callable[[str], Any], low: float, high: float) -> Callable[[str], Any]:
    kind = "a whole number" if convert is int else "a number"

    def read(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{name} is {text!r}, it must be {kind}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{name} is {text}, {low:g} to {high:g} are possible")
        return value

    return read


_seed = _number("the seed", int, 0, 2**63 - 1)


def _range(text: str) -> range:
    first, colon, last = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of seeds: give FIRST:LAST, both included")
    low, high = _seed(first), _seed(last)
    if low > high:
        raise argparse.ArgumentTypeError(f"the range {text} is empty: FIRST:LAST, both included, in rising order")
    return range(low, high + 1)


_nodes = _number("the number of nodes", int, 1, 4096)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_nodes(each) for each in text.split(","))


def _workloads(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}")
    return names


def command_line() -> _Parser:
    """Make the parser of the command line, from which its reference page is made as well."""
    parser = _Parser(prog="python -m simulation", description=__doc__, allow_abbrev=False)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=_seed, help="play one run")
    what.add_argument("--seeds", type=_range, metavar="FIRST:LAST", help="play these, both included")
    what.add_argument("--schedule", type=Path, metavar="FILE", help="play a schedule that --shrink has written")
    what.add_argument("--capacity", choices=tuple(STEPS), help="measure what one costs in clusters of --nodes N,...")
    parser.add_argument(
        "--nodes",
        type=_sizes,
        metavar="N,...",
        help="number of nodes of a cluster (default: 6); several with --capacity",
    )
    parser.add_argument(
        "--duration", type=_number("the duration", float, 0.01, 1e6), help="virtual seconds of a run (default: 30)"
    )
    parser.add_argument(
        "--workloads",
        type=_workloads,
        metavar="NAME,...",
        help=f"what programs do: {', '.join(WORKLOADS)} (default: some of them, drawn)",
    )
    parser.add_argument(
        "--wire",
        choices=("mixed", *WIRES),
        help="the path of frames (default: mixed, which is native at each tenth seed)",
    )
    parser.add_argument(
        "--jobs", type=_number("the number of jobs", int, 1, 256), default=1, help="number of runs at a time"
    )
    parser.add_argument(
        "--budget", type=_number("the budget", float, 0.01, 1e9), help="wall seconds after which no run begins"
    )
    parser.add_argument("--fail-fast", action="store_true", help="end with the first run that fails")
    parser.add_argument("--shrink", action="store_true", help="write SEED.toml, the smallest schedule that still fails")
    parser.add_argument("--json", action="store_true", help="print a JSON line a run, and one at the end")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the events of one run")
    parser.add_argument("--chrome", type=Path, metavar="FILE", help="write them as chrome://tracing and Perfetto read")
    parser.add_argument("--from", type=float, dest="since", metavar="SECONDS", help="write no earlier events")
    parser.add_argument("--until", type=float, metavar="SECONDS", help="write no later events")
    parser.add_argument("--only", metavar="HOST,...", help="write events of these hosts or processes only")
    return parser


def _commit() -> str:
    """The commit of this clone; ``unknown`` without one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _repeat(schedule: Schedule) -> str:
    """The command that repeats a run."""
    words = ["--seed", str(schedule.seed), "--nodes", str(schedule.nodes), "--duration", f"{schedule.duration:g}"]
    words += ["--workloads", ",".join(schedule.workloads), "--wire", schedule.wire]
    return "python -m simulation " + shlex.join(words)


class _Watch:
    """A watch that ends the program where one turn of a simulated process blocks the thread, and names the process."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        world, begun, seen = self._run.world, time.monotonic(), -1
        while not self._over.wait(min(1.0, BLOCKED / 10)):
            if world.events != seen:
                begun, seen = time.monotonic(), world.events
            elif time.monotonic() - begun > BLOCKED:
                print(
                    f"seed {self._run.schedule.seed}: at virtual second {world.now:.6f} process {world.turn} has "
                    f"blocked the thread for {BLOCKED:g} s",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
                os._exit(1)


def _play(schedule: Schedule, trace: Trace | None = None) -> Run:
    run = Run(schedule, trace)
    with _Watch(run):
        run.play()
    return run


def _report(run: Run, line: dict[str, Any], repeat: str) -> str:
    """The report of a failed run, for people."""
    text = [f"seed {line['seed']} of commit {line['commit']} is broken:"]
    text += [f"  {broken['invariant']} at {broken['at']:.6f} s: {broken['text']}" for broken in line["broken"]]
    text += [f"  fault at {fault.at:.3f} s: {fault.kind} {' '.join(fault.who)}" for fault in run.faults.done]
    named = {place for broken in line["broken"] for place in _PLACE.findall(broken["text"])}
    events = [event for _, place, event in run.trace.latest if not named or place in named]
    text += [f"  {event}" for event in events[-_SHOWN:]]
    text.append(f"repeat it by: {repeat}")
    return "\n".join(text)


def _one(schedule: Schedule, commit: str) -> tuple[dict[str, Any], str]:
    """Play one run in a process of several: its line, and its report where it failed."""
    run = _play(schedule)
    line = run.line(commit)
    return line, "" if line["ok"] else _report(run, line, _repeat(schedule))


def _results(schedules: Sequence[Schedule], jobs: int, commit: str) -> Generator[tuple[dict[str, Any], str]]:
    """The result of each schedule, in the order of the seeds."""
    if jobs == 1:
        set_apart()
        try:
            for schedule in schedules:
                yield _one(schedule, commit)
        finally:
            gc.unfreeze()
        return
    with multiprocessing.get_context("spawn").Pool(jobs, set_apart) as pool:
        waiting: list[Any] = []
        for schedule in schedules:
            waiting.append(pool.apply_async(_one, (schedule, commit)))
            if len(waiting) > 2 * jobs:
                yield waiting.pop(0).get()
        for result in waiting:
            yield result.get()


def _say(line: dict[str, Any], report: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(line), flush=True)
    elif report:
        print(report, flush=True)
    else:
        print(
            f"seed {line['seed']}: {line['digest']}, {line['calls']} calls, {len(line['faults'])} faults, "
            f"{line['events']} events in {line['virtual_s']:.1f} virtual s, {line['cpu_s']:.1f} s of CPU",
            flush=True,
        )


class _EventFile:
    """A file for the events of a run. The first failure is kept, and nothing more is written: an error within the run
    would reach the simulated processes.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="ascii")
        self.error: OSError | None = None
        """The first failure."""

    def write(self, text: str) -> None:
        """Write some text, unless that has failed before."""
        if self.error is None:
            try:
                self._file.write(text)
            except OSError as error:
                self.error = error

    def close(self) -> None:
        """Write the rest, and close the file."""
        try:
            self._file.close()
        except OSError as error:
            self.error = error


def _traced(arguments: argparse.Namespace, schedule: Schedule, parser: _Parser) -> Run:
    """Play a run, and write its events to the files that the arguments name."""
    takers: list[Callable[[str], object]] = []
    files: dict[str, _EventFile] = {}
    with ExitStack() as stack:
        for option in ("trace", "chrome"):
            path: Path | None = getattr(arguments, option)
            if path is None:
                continue
            try:
                files[f"--{option} {path}"] = file = _EventFile(path)
            except OSError as error:
                parser.error(f"--{option} {path}: {error.strerror}; give a file that can be written")
            stack.callback(file.close)
            if option == "trace":
                takers.append(partial(print, file=file))
            else:
                chrome = ChromeFile(file)
                stack.callback(chrome.close)
                takers.append(chrome.take)

        def write(line: str) -> None:
            for take in takers:
                take(line)

        only = None if arguments.only is None else frozenset(arguments.only.split(","))
        since = 0.0 if arguments.since is None else arguments.since
        until = float("inf") if arguments.until is None else arguments.until
        run = _play(schedule, Trace(write, since=since, until=until, only=only) if takers else None)
    for said, file in files.items():
        if file.error is not None:
            parser.error(f"{said}: {file.error.strerror}; the events are not all there: give a file with room for them")
    return run


def _single(
    arguments: argparse.Namespace, schedule: Schedule, parser: _Parser, commit: str
) -> Generator[tuple[dict[str, Any], str]]:
    """The result of one run."""
    run = _traced(arguments, schedule, parser)
    line = run.line(commit)
    repeat = _repeat(schedule)
    if arguments.schedule is not None:
        repeat = shlex.join(["python", "-m", "simulation", "--schedule", str(arguments.schedule)])
    yield line, "" if line["ok"] else _report(run, line, repeat)


def _shrunk(schedule: Schedule, line: dict[str, Any], *, quiet: bool) -> None:
    """Write the smallest schedule that breaks the same invariant."""
    invariant = line["broken"][0]["invariant"]

    def breaks(smaller: Schedule) -> bool:
        return any(broken.invariant == invariant for broken in _play(smaller).record.broken)

    found = shrink(schedule, breaks)
    path = Path(f"{schedule.seed}.toml")
    path.write_text(found.text(), "utf-8")
    if not quiet:
        print(
            f"{path}: {invariant} with {len(found.faults)} faults, {found.nodes} nodes, {found.duration:g} virtual s; "
            f"play it by: python -m simulation --schedule {path}"
        )


def _schedules(arguments: argparse.Namespace, parser: _Parser) -> list[Schedule]:
    """The schedules to play."""
    if arguments.schedule is not None:
        for name in ("nodes", "duration", "workloads", "wire"):
            if getattr(arguments, name) is not None:
                parser.error(f"--{name} is the schedule's own: leave it out beside --schedule")
        try:
            return [Schedule.read(arguments.schedule, list(WORKLOADS))]
        except BadSchedule as error:
            parser.error(str(error))
    seeds = arguments.seeds if arguments.seeds is not None else (arguments.seed,)
    nodes = 6 if arguments.nodes is None else arguments.nodes[0]
    duration = 30.0 if arguments.duration is None else arguments.duration
    wire = arguments.wire or "mixed"
    return [draw(seed, nodes, duration, arguments.workloads or (), list(WORKLOADS), wire) for seed in seeds]


def _capacity(arguments: argparse.Namespace, parser: _Parser) -> int:
    """Measure a step in clusters of several sizes."""
    for name in ("duration", "workloads", "wire", "trace", "chrome", "budget"):
        if getattr(arguments, name) is not None:
            parser.error(f"--{name} is for runs: leave it out beside --capacity")
    for line in measure(arguments.capacity, arguments.nodes or (6,)):
        if arguments.json:
            print(json.dumps(line), flush=True)
        else:
            print(
                f"{line['what']} at {line['nodes']} nodes: {line['head_us']} us of CPU at the head, "
                f"{line['all_us']} us in all, of {line['spawns']}",
                flush=True,
            )
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Play what the command line asks for.

    Returns:
        0 where every invariant held, 1 where one did not.
    """
    parser = command_line()
    arguments = parser.parse_args(words)
    if arguments.trace is None and arguments.chrome is None:
        for name, value in (("from", arguments.since), ("until", arguments.until), ("only", arguments.only)):
            if value is not None:
                parser.error(f"--{name} says which events are written: give --trace FILE or --chrome FILE as well")
    elif arguments.seeds is not None:
        parser.error(f"--{'chrome' if arguments.trace is None else 'trace'} is for one run: give --seed")
    if arguments.capacity is not None:
        return _capacity(arguments, parser)
    if arguments.nodes is not None and len(arguments.nodes) > 1:
        parser.error("--nodes takes one number, and several beside --capacity alone")
    schedules = _schedules(arguments, parser)
    commit, began = _commit(), time.monotonic()
    failed: list[int] = []
    count = 0
    if arguments.seeds is None:
        results = _single(arguments, schedules[0], parser, commit)
    else:
        results = _results(schedules, arguments.jobs, commit)
    with closing(results):
        for schedule, (line, report) in zip(schedules, results, strict=False):
            count += 1
            _say(line, report, as_json=arguments.json)
            if not line["ok"]:
                failed.append(line["seed"])
                if arguments.shrink:
                    _shrunk(schedule, line, quiet=arguments.json)
                if arguments.fail_fast:
                    break
            if arguments.budget is not None and time.monotonic() - began >= arguments.budget:
                break
    wall = round(time.monotonic() - began, 3)
    if arguments.json:
        print(json.dumps({"summary": True, "seeds": count, "failed": failed, "wall_s": wall}), flush=True)
    elif arguments.seeds is not None:
        print(f"{count} seeds in {wall:.1f} s, {len(failed)} failed{': ' if failed else ''}{str(failed)[1:-1]}")
    return 1 if failed else 0
