"""Run benchmarks and show the figures; see the package."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks import DEVELOPERS, ITEMS, USERS, machine
from benchmarks.harness import FULL, QUICK, Measurement, Scale, markdown, one_of, show
from zcactor.workers.zygote import set_death_signal

_LIMIT, _QUICK_LIMIT, _USERS_LIMIT = 240.0, 60.0, 1800.0
"""Seconds after which one item counts as hanging and is killed: several times the time of the slowest. In a row for
users the programs of other libraries start again and again."""


def run_item(name: str, scale: Scale, limit: float) -> tuple[list[Measurement], int]:
    """Measure one item in a fresh interpreter.

    Returns:
        Its measurements, and its exit status: not 0 when it failed, after the measurements that it finished.
    """
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "benchmarks", "child", name, str(write_end), str(scale.runs), str(scale.share)]
    with subprocess.Popen(command, pass_fds=(write_end,), start_new_session=True, cwd=_ROOT) as child:
        os.close(write_end)
        watchdog = threading.Timer(limit, os.killpg, (child.pid, signal.SIGKILL))
        watchdog.start()
        try:
            with open(read_end) as lines:
                found = [Measurement.from_plain(json.loads(line)) for line in lines]
            status = child.wait()
        except KeyboardInterrupt:
            os.killpg(child.pid, signal.SIGINT)
            raise
        finally:
            watchdog.cancel()
    return found, status


def child(name: str, fd: str, runs: str, share: str) -> None:
    """Measure item `name` in this interpreter, and write each measurement to descriptor `fd`, a line of JSON each."""
    os.set_inheritable(int(fd), False)  # actors that outlived a crash must not keep the reader waiting
    set_death_signal(signal.SIGINT)  # measuring goes on for minutes else where the command is killed
    measure = getattr(importlib.import_module(f"benchmarks.{ITEMS[name][0]}"), f"measure_{name}")
    with open(int(fd), "w", buffering=1) as lines:
        lines.writelines(json.dumps(found.plain()) + "\n" for found in measure(Scale(int(runs), float(share))))


_ROOT = Path(__file__).resolve().parents[1]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What zcactor costs, next to a floor.")
    which = f"for users {', '.join(USERS)}; for developers, and by default, {', '.join(DEVELOPERS)}"
    parser.add_argument("items", nargs="*", metavar="ITEM", type=one_of(ITEMS), help=which)
    parser.add_argument("--quick", action="store_true", help="fewer runs and smaller counts: under a minute")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, one JSON object a line")
    parser.add_argument("--read", type=Path, metavar="PATH", help="measure nothing, show such a file")
    parser.add_argument(
        "--markdown", action="store_true",
        help="write the page of all budgets; with ITEMs or --read: end with their Markdown table",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: docs/budgets.md)")
    parser.add_argument("--table", action="store_true", help="end with a Markdown table of what has a budget")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a budget does not hold")
    parser.add_argument("--runs", type=int, help="interleaved runs whose median counts")
    parser.add_argument("--share", type=float, help="what all counts of a full measurement are multiplied by")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks.

    Returns:
        0, or 1 when an item failed; with ``--strict`` also when a budget does not hold.
    """
    options = parse(arguments)
    if options.markdown and not options.items and options.read is None:
        from benchmarks import budgets  # which imports the tests' hosts: no item's interpreter is to have them

        return budgets.write(options.out or budgets.PAGE)
    base = QUICK if options.quick else FULL
    scale = Scale(options.runs or base.runs, base.share if options.share is None else options.share)
    names = options.items or list(DEVELOPERS if options.read is None else ITEMS)
    measurements: list[Measurement] = []
    failed: list[str] = []
    began = time.perf_counter()
    if options.read is not None:
        lines = [json.loads(line) for line in options.read.read_text().splitlines()]
        measurements = [Measurement.from_plain(line) for line in lines if line.get("item") in names]
        for name in names:
            if mine := [m for m in measurements if m.item == name]:
                show(ITEMS[name][1], mine)
    else:
        about = machine.describe()
        print(
            f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, Python {about['python']}, "
            f"huge pages for shared memory: {about['shared_huge_pages'] or 'none'}\n",
            flush=True,
        )
        for name in names:
            limit = _USERS_LIMIT if name in USERS else _QUICK_LIMIT if options.quick else _LIMIT
            found, status = run_item(name, scale, limit)
            measurements += found
            show(ITEMS[name][1], found)
            if status:
                failed.append(name)
                print(f"{name} FAILED: its process ended with status {status}\n", flush=True)
        if options.json is not None:
            command = " ".join(["python -m benchmarks", *(sys.argv[1:] if arguments is None else arguments)])
            records = [
                {"machine": about, "command": command, "quick": options.quick, "runs": scale.runs, "share": scale.share}
            ]
            records += [measurement.plain() for measurement in measurements]
            options.json.write_text("".join(json.dumps(record) + "\n" for record in records))
    if options.markdown or options.table:
        print(markdown(measurements) + "\n")
    with_budget = [m for m in measurements if m.budget is not None]
    missed = [m for m in with_budget if m.verdict == "FAIL"]
    print(f"{len(with_budget) - len(missed)} of {len(with_budget)} budgets hold", end="")
    print(f", {time.perf_counter() - began:.0f} s" if options.read is None else "")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed) or (options.strict and bool(missed)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    else:
        sys.exit(main())
