"""One large array goes through three actors, in three processes, without being copied.

    python examples/quickstart.py                 # 1 GiB
    python examples/quickstart.py --size 64MiB

The first actor makes the array in the store; the second and the third are given a reference and map the same memory.
Each computes a checksum of the array that it sees. Then the same array goes through a pipe, as pickle, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import zcactor as zc

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Array = npt.NDArray[np.float64]
Row = tuple[str, str, str, str]
MEMORY_FACTOR = 6
"""Bytes of free memory for each byte of the array: the array, and up to five copies that pickle and the pipe make."""
PIPE_RUNS = 2
"""Runs through the pipe, of which the better counts. Ours is measured once, with everything that the first call to an
actor costs."""
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def checksum(array: Array) -> int:
    """The sum of all 8-byte words modulo 2**64, plus a sample of every 4,099th word weighted by its position.

    The sum changes with every bit that changes, the sample also when large pieces change places.
    """
    words = array.view(np.uint64)
    sample = words[::4099]
    places = np.arange(1, len(sample) + 1, dtype=np.uint64)
    return (int(words.sum()) + int((sample * places).sum())) % (1 << 64)


@zc.actor
class Station:
    """An actor that keeps an array, and computes its checksum in its own process."""

    def __init__(self) -> None:
        self.array: Array = np.empty(0)

    @zc.method
    def make(self, nbytes: int) -> Array:
        """Make an array of random numbers, born in the store. The result goes out as a reference."""
        self.array = np.random.default_rng(1).random(nbytes // 8)
        return self.array

    @zc.method
    def take(self, array: Array) -> Array:
        """Keep the array and pass it on. `array` is a view of the memory of the actor that made it."""
        self.array = array
        return array

    @zc.method
    def check(self) -> tuple[int, float, int]:
        """The checksum, its time in seconds, and this process's pid."""
        started = time.perf_counter()
        return checksum(self.array), time.perf_counter() - started, os.getpid()


def receive_by_pipe(pipe: Connection) -> None:
    """Play the other end of the comparison: take arrays from a pipe, report each, then send their checksums."""
    pipe.send("ready")
    for _ in range(PIPE_RUNS):
        array = pipe.recv()
        pipe.send("here")
        started = time.perf_counter()
        pipe.send((checksum(array), time.perf_counter() - started))
        del array  # its memory is warm for the next run


def send_by_pipe(array: Array) -> tuple[float, float, int]:
    """Seconds until the array has come out of a pipe in another process, seconds of its checksum there, and the
    checksum."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive_by_pipe, args=(theirs,))
    process.start()
    theirs.close()
    ours.recv()
    runs: list[tuple[float, float, int]] = []
    for _ in range(PIPE_RUNS):
        started = time.perf_counter()
        ours.send(array)
        ours.recv()
        sent = time.perf_counter() - started
        total, summed = ours.recv()
        runs.append((sent, summed, total))
    process.join()
    return min(runs)


class Terminal:
    """Progress and a table: by rich where it is installed, in plain text otherwise."""

    def __init__(self) -> None:
        self.console: Any = None
        try:
            from rich.console import Console
        except ImportError:
            return
        self.console = Console(highlight=False)

    def say(self, text: str) -> None:
        """Print one line of progress."""
        print(text, flush=True) if self.console is None else self.console.print(f"[green]✔[/] {text}", soft_wrap=True)

    def table(self, heads: Row, rows: list[Row]) -> None:
        """Print a table: the left column to the left, the others to the right."""
        if self.console is None:
            widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
            for row in (heads, *rows):
                rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
                print("  ".join((row[0].ljust(widths[0]), *rest)))
            return
        from rich.table import Table

        table = Table(*heads, header_style="bold")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


def seconds(value: float) -> str:
    """A duration for people."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def amount(nbytes: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def parse_size(text: str) -> int:
    """A size: ``"1GiB"``, ``"64MiB"``, ``"100 MB"`` or plain bytes, rounded down to whole float64 elements."""
    found = re.fullmatch(r"([\d_.]+)\s*([KMG]I?)?B?", text.strip().upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for instance 1GiB, 64MiB or 1048576")
    nbytes = int(float(found[1]) * UNITS[found[2] or ""]) // 8 * 8
    if nbytes < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1MiB: too small to show anything")
    return nbytes


def free_memory() -> int:
    """Bytes that programs can still have (MemAvailable, proc(5))."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


async def relay(nbytes: int, terminal: Terminal) -> None:
    """Run the whole program."""
    rows: list[Row] = []
    async with zc.init(store_capacity=nbytes + (64 << 20)):
        first, second, third = await asyncio.gather(*(Station.options(name=name).spawn() for name in ("1", "2", "3")))
        terminal.say("three actors run, each in a process of its own")

        started = time.perf_counter()
        ref = first.make(nbytes)
        await zc.wait([ref])  # until the array is made; the driver holds a reference and never looks at the bytes
        took = time.perf_counter() - started
        expected, summed, pid = await first.check()
        terminal.say(f"actor 1 (pid {pid}) has made {amount(nbytes)} of random numbers, checksum {expected:016x}")
        rows.append((f"actor 1 makes {amount(nbytes)}", seconds(took), seconds(summed), seconds(took + summed)))

        slowest = 0.0
        for name, station in (("1 → 2", second), ("2 → 3", third)):
            started = time.perf_counter()
            ref = station.take(ref)
            await zc.wait([ref])
            took = time.perf_counter() - started
            total, summed, pid = await station.check()
            if total != expected:
                sys.exit(f"actor {name[-1]} sees the checksum {total:016x} instead of {expected:016x}")
            terminal.say(f"actor {name[-1]} (pid {pid}) has the array: same checksum")
            slowest = max(slowest, took + summed)
            rows.append((f"actor {name}, by reference", seconds(took), seconds(summed), seconds(took + summed)))

        stats = [zc.stats(), *await asyncio.gather(*map(zc.stats, (first, second, third)))]
        copied = sum(each.bytes_copied for each in stats)

        terminal.say("now the same array through a pipe, as pickle ...")
        sent, summed, total = await asyncio.to_thread(send_by_pipe, await ref)
        if total != expected:
            sys.exit(f"the pipe delivered the checksum {total:016x} instead of {expected:016x}")
        rows.append(("pickle through a pipe", seconds(sent), seconds(summed), seconds(sent + summed)))

    terminal.table(("one array", "call", "checksum", "both"), rows)
    terminal.say(f"bytes_copied, driver and three actors together: {copied}")
    factor = (sent + summed) / slowest
    terminal.say(f"passed on and read by the next actor: {factor:,.0f} times as fast as with pickle through a pipe")
    if copied:
        sys.exit(f"{copied} bytes were copied, and none should have been")


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description="Pass one large array through three actors without copying it.")
    parser.add_argument("--size", type=parse_size, default="1GiB", help="of the array: 1GiB (default), 64MiB, ...")
    nbytes: int = parser.parse_args().size
    free = free_memory()
    if free < MEMORY_FACTOR * nbytes:
        sys.exit(
            f"{amount(nbytes)} need about {amount(MEMORY_FACTOR * nbytes)} of free memory, because the comparison with "
            f"pickle makes copies; {amount(free)} are free. Try --size {max(free // MEMORY_FACTOR >> 20, 1)}MiB"
        )
    zc.run(relay(nbytes, Terminal()))


if __name__ == "__main__":
    main()
