"""This checkout next to another revision of it, in turns on one core: the cost of a change to calls, arrays and spawns.

::

    python -m benchmarks.paired --base REV                   # every item
    python -m benchmarks.paired --base REV sync pipelined    # some of them
    python -m benchmarks.paired --base REV --over sealed     # over TCP with sealed frames; or tcp, local (the default)

The revision is installed into a temporary folder, for the interpreter that runs this. In each round one side measures
right after the other, every other round in the opposite order. Both are started anew a few times: the place of a
process's memory can cost it a twentieth as long as it lives (Mytkowicz and others, "Producing Wrong Data Without Doing
Anything Obviously Wrong!", ASPLOS 2009). The figure of a side is the least of its rounds: on a busy machine medians of
one and the same program differ by a fifth, and the least by a twentieth. The budget also allows a twentieth. Rounds are
short and many: the speed of a shared machine changes from one second to the next, and both sides must have had a fast
second.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from benchmarks.harness import Measurement, at_most, options_of, report, show, spread
from benchmarks.machine import cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

__all__ = ["ITEMS", "ROOT", "WAYS", "Side", "built", "launches", "main"]

ROOT: Final = Path(__file__).resolve().parents[1]
ITEMS: Final[Mapping[str, tuple[str, int]]] = {
    "sync": ("sync call", 1000),
    "async": ("async call", 1000),
    "inline": ("inline call", 1000),
    "pipelined": ("call, 1,000 in flight", 10_000),
    "array": ("8 MiB array as argument", 2000),
    "object-20k": ("20 KiB object as argument", 500),
    "object-100k": ("100 KiB object as argument", 500),
    "object-1m": ("1 MiB object as argument", 100),
    "spawn": ("spawn and kill", 20),
    "shared": ("spawn, plain call and end of a shared actor, 300 at once", 300),
    "shared-1000": ("spawn, plain call and end of a shared actor, 1,000 at once", 1000),
}
"""The name of each item, and its count in a round."""
WAYS: Final[Mapping[str, Mapping[str, object]]] = {
    "local": {},
    "tcp": {"transports": ["tcp"], "security": "off"},
    "sealed": {"transports": ["tcp"]},
}
"""The settings of a way from driver to actor."""
ROUNDS, QUICK_ROUNDS = 48, 24
LAUNCHES: Final = 8
"""The number of times that both sides are started, each for a share of the rounds."""
LIMIT = 1.05


class Side:
    """The program of one revision.

    Args:
        tree: the folder with its package.
        core: the core on which all its processes stay.
        settings: for `zc.Config`.
        way: "spawned", or "fake" for calls over the fake device within one process.
    """

    def __init__(self, tree: Path, core: int, settings: Mapping[str, object], way: str = "spawned") -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        has_security = "security: str" in (tree / "zcactor" / "config.py").read_text()  # others call it sealing
        environment |= {
            f"ZCACTOR_{(name if has_security else name.replace('security', 'sealing')).upper()}": ",".join(value)
            if isinstance(value, list)
            else str(value)
            for name, value in settings.items()
        }
        program = ROOT / "benchmarks" / "paired_side.py"
        self._process = subprocess.Popen(
            [sys.executable, str(program), str(core), str(tree), way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tree,
        )

    def __enter__(self) -> Self:
        self._line()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"one side ended with status {self._process.wait()}; its error stands above")
        return line

    def measure(self, item: str, count: int) -> float:
        """Microseconds of one call, array or spawn of `item`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{item} {count}\n")
        self._process.stdin.flush()
        return float(self._line()) * 1e6


def turns(sides: Sequence[Side], item: str, count: int, rounds: int, *, warm_up: bool = True) -> list[list[float]]:
    """Microseconds of one call, array or spawn on each side, of so many rounds; every other round is in the opposite
    order."""
    figures: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds + warm_up):
        for which in range(len(sides))[:: -1 if turn % 2 else 1]:
            figures[which].append(sides[which].measure(item, count))
    return [side[warm_up:] for side in figures]


def launches(
    sides: Sequence[Callable[[], Side]], counts: Mapping[str, int], rounds: int, times: int = LAUNCHES
) -> dict[str, list[list[float]]]:
    """Microseconds of one call, array or spawn of each item on each side, of `rounds` rounds over so many launches.

    Args:
        sides: functions that each start a side.
        counts: the count of each item in a round.
        rounds: the rounds of each item; at least one in a launch.
        times: launches.
    """
    figures: dict[str, list[list[float]]] = {item: [[] for _ in sides] for item in counts}
    for _ in range(times):
        with contextlib.ExitStack() as stack:
            living = [stack.enter_context(side()) for side in sides]
            for item, count in counts.items():
                for taken, more in zip(figures[item], turns(living, item, count, max(rounds // times, 1)), strict=True):
                    taken += more
    return figures


@contextlib.contextmanager
def built(revision: str) -> Iterator[Path]:
    """A folder with the package of `revision` as it is installed; gone afterwards.

    Raises:
        subprocess.CalledProcessError: the revision does not exist, or does not build.
    """
    with tempfile.TemporaryDirectory(prefix="zcactor-paired-") as folder:
        tree, package = Path(folder) / "tree", Path(folder) / "package"
        _run("git", "worktree", "add", "--quiet", "--detach", str(tree), revision)
        try:
            _run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(package), str(tree))
        finally:
            _run("git", "worktree", "remove", "--force", str(tree))
        yield package


def _run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)


def compare(base: Path, way: str, items: list[str], rounds: int, times: int = LAUNCHES) -> list[Measurement]:
    """The least of each item on either side, of `rounds` rounds over so many launches."""
    core, settings = cores()[-1], WAYS[way]
    counts = {item: ITEMS[item][1] for item in items}
    if way != "local" and "array" in counts:
        counts["array"] //= 40  # the bytes are received, not mapped
    sides = [partial(Side, base, core, settings), partial(Side, ROOT, core, settings)]
    found = []
    for item, figures in launches(sides, counts, rounds, times).items():
        name, (before, after) = ITEMS[item][0], map(min, figures)
        print(f"{name}, {way}: {before:.1f} us, {after:.1f} us", file=sys.stderr, flush=True)
        found.append(
            Measurement(
                "paired", f"{name}, {way}", after, "us", before, "the base", at_most(LIMIT), rounds, "least",
                spread(figures[1]),
            )
        )  # fmt: skip
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold.
    """
    parser = options_of("benchmarks.paired", "This checkout next to another revision, in turns.", ITEMS)
    parser.add_argument("--base", required=True, metavar="REV", help="the revision to compare with")
    parser.add_argument("--built", type=Path, metavar="FOLDER", help="where that revision's package is already")
    parser.add_argument("--rounds", type=int, help="how many there are")
    parser.add_argument("--over", choices=WAYS, action="append", help="the way to the actor (default: local)")
    options = parser.parse_args(arguments)
    found: list[Measurement] = []
    try:
        with contextlib.nullcontext(options.built) if options.built else built(options.base) as base:
            for way in options.over or ["local"]:
                rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
                found += compare(base, way, options.parts or list(ITEMS), rounds)
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(error.cmd)} failed: {error.stderr.strip()}", file=sys.stderr)
        return 2
    show(f"This checkout next to {options.base}", found)
    return report(options, found)


if __name__ == "__main__":
    sys.exit(main())
