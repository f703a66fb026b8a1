"""The ways of ``python -m zcactor demo`` to compute on one frame: multiprocessing, joblib and zcactor.

Each way is a program of its own, as a user would write it: ``python demo_ways.py WAY NBYTES SETS WORKERS``. It starts
its workers, gives them the frame with one set of parameters after the other, ends them, and prints one line of JSON.
The library is imported by its own way alone, so that no worker loads what it does not use. NumPy is imported where it
computes, because the command line reads the names of the ways without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    import numpy as np
    import numpy.typing as npt

    Frame = npt.NDArray[np.float64]

__all__ = ["COLUMNS", "SHARED", "WAYS", "Scorer", "clipped_sum", "frame_of", "main", "written"]

Bounds = tuple[float, float]

COLUMNS: Final = 8
SHARED: Final = Path("/dev/shm")
"""The folder in which joblib puts arrays, and multiprocessing its semaphores."""
_ROWS: Final = 65536
"""Rows at a time: their copy of 4 MiB is the only memory that the computing takes."""
_PAUSE: Final = 0.02
"""Seconds between two looks at the memory. A task takes several times as long."""


def frame_of(nbytes: int) -> Frame:
    """The frame: random numbers in rows of `COLUMNS`, the same ones for each way.

    Args:
        nbytes: its size, in bytes.
    """
    import numpy as np

    return np.random.default_rng(7).random((nbytes // 8 // COLUMNS, COLUMNS))


def clipped_sum(frame: Frame, bounds: Bounds) -> float:
    """The computation: the sum of all numbers, each of them brought to the nearest one within `bounds`."""
    import numpy as np

    low, high = bounds
    rows = range(0, len(frame), _ROWS)
    return sum(float(np.clip(frame[row : row + _ROWS], low, high).sum()) for row in rows)


_kept: list[Frame] = []


def _keep(frame: Frame) -> None:
    """Keep the frame in this process, for `_on_kept`."""
    _kept.append(frame)


def _on_kept(bounds: Bounds) -> float:
    return clipped_sum(_kept[0], bounds)


class Scorer:
    """The actor of zcactor's way."""

    def score(self, frame: Frame, bounds: Bounds) -> float:
        """See `clipped_sum`."""
        return clipped_sum(frame, bounds)

    def copied(self) -> int:
        """The bytes that zcactor has copied in this process."""
        import zcactor as zc

        return zc.stats().bytes_copied


def written() -> int | None:
    """The bytes that this process has written to pipes and files (proc(5), io); None where the system counts none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text("ascii").splitlines():
            if line.startswith("wchar:"):
                return int(line.split()[1])
    return None


def _private_of(pid: int) -> int:
    """The bytes of memory that a process shares with no other. 0 where it has just ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) << 10
    return 0


def _started() -> list[int]:
    """The pids of all processes that come from this one."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
            parent = int(path.read_text("ascii", "replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


class Measured:
    """The figures of one way.

    Args:
        nbytes: of the frame.
        bounds: the sets of parameters.
        workers: the number of worker processes.
    """

    def __init__(self, nbytes: int, bounds: Sequence[Bounds], workers: int) -> None:
        self.nbytes = nbytes
        self.bounds = bounds
        self.workers = workers
        self.start = 0.0
        """Seconds until all workers are there."""
        self.run = 0.0
        """Seconds of all sets of parameters."""
        self.copied: int | None = 0
        """Bytes that went through pipes and files, and that zcactor has copied; None where the system counts none."""
        self.memory: int | None = None
        """Bytes that the processes which the way has started hold for themselves, and files in memory; at most, while
        they compute. None where the system does not tell."""
        self.sums: list[float] = []

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Count the time, and the bytes, of a step that makes workers ready."""
        before, at = written(), time.perf_counter()
        yield
        self.start += time.perf_counter() - at
        self._count(before)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the time, and the bytes, of the work."""
        before, at = written(), time.perf_counter()
        yield
        self.run = time.perf_counter() - at
        self._count(before)

    def _count(self, before: int | None) -> None:
        now = written()
        self.copied = None if before is None or now is None or self.copied is None else self.copied + now - before

    @contextlib.contextmanager
    def looking(self, files: Path | None = None) -> Iterator[None]:
        """Look at the memory again and again, while work is done of which no time is taken.

        Args:
            files: the folder of the library's files in memory.
        """
        if not Path("/proc/self/smaps_rollup").exists():
            yield
            return
        done = threading.Event()

        def look() -> None:
            while not done.is_set():
                here = 0 if files is None else _size_of(files)
                self.memory = max(self.memory or 0, here + sum(map(_private_of, _started())))
                done.wait(_PAUSE)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @property
    def few(self) -> Sequence[Bounds]:
        """Two sets for each worker: the work while the memory is looked at."""
        return self.bounds[: 2 * self.workers]


def _size_of(folder: Path) -> int:
    """The bytes of all files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it was removed meanwhile
            total += 0 if path.is_dir() else path.stat().st_size
    return total


def _by_argument(found: Measured) -> None:
    frame = frame_of(found.nbytes)
    with contextlib.ExitStack() as stack:
        with found.starting():
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(found.workers))
            pool.map(abs, range(found.workers), 1)
        with found.running():
            found.sums = pool.starmap(clipped_sum, [(frame, bounds) for bounds in found.bounds], 1)
        with found.looking():
            pool.starmap(clipped_sum, [(frame, bounds) for bounds in found.few], 1)
        pool.close()
        pool.join()


def _by_initializer(found: Measured) -> None:
    frame = frame_of(found.nbytes)
    with contextlib.ExitStack() as stack:
        with found.starting():
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(found.workers, _keep, (frame,)))
            pool.map(abs, range(found.workers), 1)
        with found.running():
            found.sums = pool.map(_on_kept, found.bounds, 1)
        with found.looking():
            pool.map(_on_kept, found.few, 1)
        pool.close()
        pool.join()


def _by_joblib(found: Measured) -> None:
    from joblib import Parallel, delayed
    from joblib.externals.loky import get_reusable_executor

    frame = frame_of(found.nbytes)
    with tempfile.TemporaryDirectory(prefix="zc-demo-", dir=SHARED) as folder:
        try:
            with Parallel(n_jobs=found.workers, temp_folder=folder) as parallel:
                with found.starting():
                    parallel(delayed(abs)(number) for number in range(found.workers))
                with found.running():
                    found.sums = parallel(delayed(clipped_sum)(frame, bounds) for bounds in found.bounds)
                with found.looking(Path(folder)):
                    parallel(delayed(clipped_sum)(frame, bounds) for bounds in found.few)
        finally:
            get_reusable_executor().shutdown(wait=True)


async def _with_actors(found: Measured) -> None:
    import zcactor as zc

    async with contextlib.AsyncExitStack() as stack:
        with found.starting():
            await stack.enter_async_context(zc.init(store_capacity=found.nbytes + (64 << 20), summary="off"))
        frame = zc.freeze(frame_of(found.nbytes))
        with found.starting():
            actors: Any = await asyncio.gather(*(zc.spawn(Scorer) for _ in range(found.workers)))

        def refs(bounds: Sequence[Bounds]) -> list[zc.ObjectRef[float]]:
            return [actors[turn % len(actors)].score(frame, each) for turn, each in enumerate(bounds)]

        with found.running():
            found.sums = await zc.get(refs(found.bounds))
        copies = [zc.stats().bytes_copied, *await zc.get([actor.copied() for actor in actors])]
        found.copied = None if found.copied is None else found.copied + sum(copies)
        with found.looking():
            await zc.get(refs(found.few))


def _by_zcactor(found: Measured) -> None:
    import zcactor as zc

    zc.run(_with_actors(found))


WAYS: Final[dict[str, Callable[[Measured], None]]] = {
    "argument": _by_argument,
    "initializer": _by_initializer,
    "joblib": _by_joblib,
    "zcactor": _by_zcactor,
}


def _end(number: int, _: FrameType | None) -> NoReturn:
    """End this program in order. Its workers have the signal's usual effect, as they are started anew."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _until_parent_ends() -> None:
    """Wait until the command has ended, which holds the other end of our standard input, and end this program too."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(words: Sequence[str]) -> None:
    """Go one way, and print its figures: ``start``, ``run``, ``copied``, ``memory`` and ``sums``.

    Args:
        words: the way's name in `WAYS`, the bytes of the frame, and the numbers of sets and of workers.
    """
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_until_parent_ends, daemon=True).start()
    nbytes, sets, workers = map(int, words[1:])
    found = Measured(nbytes, [(0.4 * turn / sets, 1 - 0.4 * turn / sets) for turn in range(sets)], workers)
    WAYS[words[0]](found)
    told = {name: getattr(found, name) for name in ("start", "run", "copied", "memory", "sums")}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
