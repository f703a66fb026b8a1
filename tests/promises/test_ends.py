"""An orderly end delivers what was promised: queued calls run, files are written, exit functions run, failures are
told."""

from __future__ import annotations

import asyncio
import atexit
import gc
import io
import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest

import zcactor as zc
from tests.driver.programs import alive, gone
from zcactor.config import Config

PATIENCE = 30
"""Seconds after which an end that does not come is given up."""
_files: list[Any] = []
"""Files that only this module refers to."""


def config(shutdown_timeout: float = 20.0, **settings: Any) -> Config:
    return Config(num_cpus=4, num_gpus=0, store_capacity=1 << 26, shutdown_timeout=shutdown_timeout, **settings)


class Note:
    """An object that leaves a file when nobody refers to it, though it refers to itself."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        self.path.touch()


@zc.actor
class Writer:
    """An actor whose files, folders and objects wait for the end of its process."""

    def __init__(self, folder: Path) -> None:
        self.out = open(folder / "of an attribute", "w")  # noqa: SIM115  # it is never closed
        _files.append(open(folder / "of a module", "w"))  # noqa: SIM115
        self.bytes = open(folder / "of bytes", "wb")  # noqa: SIM115
        self.temporary = tempfile.TemporaryDirectory(dir=folder, prefix="temporary")
        self.note = Note(folder / "__del__")
        atexit.register((folder / "atexit").touch)

    def write(self) -> int:
        """Write, and leave it in the buffers."""
        for file in (self.out, _files[0]):
            file.write("a line")
        self.bytes.write(b"a line")
        return os.getpid()

    def put(self) -> zc.ObjectRef[dict[str, int]]:
        return zc.put({"a": 1})

    async def meet(self, keeper: Any) -> int:
        """Connect to another actor."""
        pid: int = await keeper.meet(None)
        return pid


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "drop", "the end of the block", "shared"])
async def test_what_is_left_to_the_end_of_a_process_is_done(tmp_path: Path, how: str) -> None:
    async with zc.init(config=config()):
        writer: Any = await Writer.options(process="shared" if how == "shared" else "own").spawn(tmp_path)
        pid = await writer.write()
        if how in ("stop", "shared"):
            await zc.stop(writer)
        del writer
        gc.collect()
        if how != "the end of the block":
            await gone(pid)
    assert not alive(pid)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    line = "a line"
    assert found == {"of an attribute": line, "of a module": line, "of bytes": line, "__del__": "", "atexit": ""}


@pytest.mark.slow
async def test_calls_that_are_held_back_are_sent_before_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with zc.init(config=config()):
        writer: Any = await Writer.spawn(tmp_path)
        await writer.put()
        session: Any = writer._remote.session
        monkeypatch.setattr(type(session.connection), "turns_behind", lambda _: 3)
        session.wire.heard = 0
        writer.write()
        assert writer._remote.session is None
        del writer, session
    assert (tmp_path / "of bytes").read_text() == "a line"


class Awaited(threading.Thread):
    """A thread that notes its name once its end is awaited, and begins the next thread then."""

    def __init__(self, note: Callable[[str], None], name: str, *names: str) -> None:
        super().__init__(name=name, daemon=False)
        self.note, self.names = note, names
        self.awaited = threading.Event()

    def join(self, timeout: float | None = None) -> None:
        self.awaited.set()
        super().join(timeout)

    def run(self) -> None:
        self.awaited.wait()
        self.note(self.name)
        if self.names:
            Awaited(self.note, *self.names).start()


@zc.actor
class Saver:
    """An actor that leaves work to threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = ThreadPoolExecutor(1)
        self.go = threading.Event()
        atexit.register(self.note, "atexit")

    def note(self, name: str) -> None:
        """Note a name, in the order of the calls."""
        with open(self.folder / "noted", "a") as file:
            file.write(f"{name}, ")

    def begin(self) -> int:
        """Begin work that ends when the actor has been closed."""
        self.pool.submit(self.wait, "a pool")
        threading.Thread(target=self.wait, args=("a thread",), daemon=False).start()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return os.getpid()

    def begin_a_row(self) -> None:
        """Begin a thread that begins another one at its end, and so on."""
        Awaited(self.note, "first", "second", "third").start()

    def wait(self, name: str) -> None:
        """Wait for the end, and note a name."""
        self.go.wait()
        self.note(name)

    def close(self) -> None:
        """Let the threads go on."""
        self.note("close")
        self.go.set()

    def hang(self) -> None:
        """Begin work that never ends."""
        threading.Thread(target=threading.Event().wait, daemon=False).start()


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
async def test_work_that_threads_have_begun_is_done(tmp_path: Path, hangs: bool) -> None:
    async with zc.init(config=config(2.0 if hangs else 20.0)):
        saver: Any = await Saver.spawn(tmp_path)
        pid = await saver.begin()
        if hangs:
            await saver.hang()
        await zc.stop(saver)
        assert not alive(pid)
    *threads, end, _ = (tmp_path / "noted").read_text().removeprefix("close, ").split(", ")
    assert (sorted(threads), end) == (["a pool", "a thread"], "atexit")


@pytest.mark.slow
async def test_threads_that_begin_at_the_end_do_their_work(tmp_path: Path) -> None:
    async with zc.init(config=config()):
        saver: Any = await Saver.spawn(tmp_path)
        await saver.begin_a_row()
        await zc.stop(saver)
    assert (tmp_path / "noted").read_text() == "close, first, second, third, atexit, "


class Refusing(io.BufferedWriter):
    """A file that cannot be written."""

    def flush(self) -> None:
        raise RuntimeError("not now")


@zc.actor
class Odd:
    """An actor with files that hinder an end."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        atexit.register(self.note)
        if kind == "full":
            self.reader, writer = os.pipe()
            _files.append(open(writer, "wb"))  # noqa: SIM115
            _files[-1].write(bytes(64 << 10))
            _files[-1].write(b"the last line")
        elif kind == "refusing":
            _files.append(Refusing(io.FileIO(folder / "refused", "w")))
        else:
            _files.append(open(folder / "detached", "w"))  # noqa: SIM115
            _files.append(io.TextIOWrapper(_files[-1].detach()))
        _files.append(open(folder / "late", "w"))  # noqa: SIM115
        _files[-1].write("a line")

    def note(self) -> None:
        """Leave a file."""
        (self.folder / "atexit").touch()

    def put(self) -> tuple[int, zc.ObjectRef[dict[str, int]]]:
        return os.getpid(), zc.put({"a": 1})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "refusing", "detached"])
async def test_a_file_that_cannot_be_written_hinders_nothing_else(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with zc.init(config=config(4.0)):
        odd: Any = await Odd.spawn(tmp_path, kind)
        pid, ref = await odd.put()
        await zc.stop(odd)
        assert not alive(pid)
        assert await ref == {"a": 1}
    assert (tmp_path / "late").read_text() == "a line" and (tmp_path / "atexit").exists()
    assert ("RuntimeError: not now" in capfd.readouterr().err) == (kind == "refusing")


@pytest.mark.slow
async def test_files_of_a_test_are_not_those_of_its_actors(zc_runtime: Any, tmp_path: Path) -> None:
    """With `zcactor.testing` actors live in the process of the test, which goes on."""
    with open(tmp_path / "of the test", "w") as file:
        file.write("a line")
        await zc.stop(await Keeper.spawn())
        assert (tmp_path / "of the test").read_text() == ""


@zc.actor
class Keeper:
    """An actor that computes on its loop while it keeps a reference."""

    def keep(self, refs: list[Any]) -> None:
        self.refs = refs

    async def compute(self, until: Path) -> None:
        """Compute until the process that writes to the FIFO `until` has opened it, and ended."""
        until.read_bytes()

    async def meet(self, writer: Any) -> int:
        """Connect to another actor, which answers then."""
        if writer is not None:
            await writer.write()
        return os.getpid()


@pytest.mark.slow
async def test_a_holder_that_computes_does_not_keep_an_end_from_its_work(tmp_path: Path) -> None:
    async with zc.init(config=config(2.0)):
        writer: Any = await Writer.spawn(tmp_path)
        keeper: Any = await Keeper.spawn()
        pid = await writer.write()
        await keeper.keep([await writer.put()])
        os.mkfifo(tmp_path / "until")
        computing = keeper.compute(tmp_path / "until")
        await zc.stop(writer)
        assert not alive(pid)
        (tmp_path / "until").write_bytes(b"now")
        (tmp_path / "until").unlink()
        await computing
        found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    line = "a line"
    assert found == {"of an attribute": line, "of a module": line, "of bytes": line, "__del__": "", "atexit": ""}


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
async def test_a_peer_that_does_not_respond_keeps_no_idle_actor_from_its_end(
    tmp_path: Path, frozen: bool, answers: bool
) -> None:
    os.mkfifo(until := tmp_path / "until")
    (folder := tmp_path / "of the writer").mkdir()
    async with zc.init(config=config(2.0)):
        writer: Any = await Writer.spawn(folder)
        keeper: Any = await Keeper.spawn()
        await writer.write()
        pid = await (keeper.meet(writer) if answers else writer.meet(keeper))
        if frozen:
            os.kill(pid, signal.SIGSTOP)
        else:
            computing = keeper.compute(until)
            file = await asyncio.to_thread(until.open, "wb")  # open once the actor reads
    if not frozen:
        file.close()
        del computing
    assert (folder / "of bytes").read_text() and (folder / "atexit").exists() and (folder / "__del__").exists()


@zc.actor
class Answering:
    """An actor whose answers wait for credit."""

    def answer(self) -> bytes:
        return bytes(15_000)


@pytest.mark.slow
@pytest.mark.parametrize("process", ["own", "shared"])
async def test_all_answers_of_an_actor_that_is_stopped_arrive(process: Literal["own", "shared"]) -> None:
    """Also where the end of the program has no time."""
    async with asyncio.timeout(PATIENCE), zc.init(config=config(0.0)):
        actor: Any = await Answering.options(process=process).spawn()
        calls = [actor.answer() for _ in range(3000)]
        _, answers = await asyncio.gather(zc.stop(actor), zc.get(calls))
        assert answers == [bytes(15_000)] * 3000


class Hanging:
    """An object whose finalizer does not return."""

    def __del__(self) -> None:
        threading.Event().wait()


@zc.actor
class Stuck:
    """An actor that cannot be dropped."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        atexit.register((folder / "atexit").touch)
        if kind == "file":
            self.reader, writer = os.pipe()
            self.file = open(writer, "wb", buffering=1 << 20)  # noqa: SIM115
            self.file.write(bytes(1 << 19))
        else:
            self.hanging = Hanging()

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        """Raise, where this is of that kind."""
        if self.kind == "raises":
            raise ValueError("not now")


@zc.actor
class Collector:
    """An actor beside such a one."""

    async def collect(self) -> int:
        """Collect what is left of other actors, on the loop."""
        gc.collect()
        return os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "object", "raises"])
async def test_an_instance_that_cannot_be_dropped_hinders_no_exit_function(tmp_path: Path, kind: str) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(config=config(4.0)):
        stuck: Any = await Stuck.spawn(tmp_path, kind)
        pid = await stuck.pid()
        await zc.stop(stuck)
        assert not alive(pid)
    assert (tmp_path / "atexit").exists()


@pytest.mark.slow
@pytest.mark.parametrize("end", [zc.stop, zc.kill])
async def test_an_instance_that_cannot_be_dropped_hinders_no_other_of_its_process(
    tmp_path: Path, end: Callable[[Any], Awaitable[None]]
) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(config=config(2.0)):
        stuck: Any = await Stuck.options(process="shared").spawn(tmp_path, "object")
        collector = Collector.options(process="shared")
        others: list[Any] = [await collector.spawn()]
        while await others[-1].collect() != await stuck.pid():
            others.append(await collector.spawn())
        await end(stuck)
        for other in others:
            await other.collect()
            await zc.stop(other)


@zc.actor
class Endless:
    """An actor whose process does not come to an end, and whose calls do not."""

    def __init__(self) -> None:
        self.never = threading.Event()

    async def numbers(self) -> Any:
        """A stream without an end."""
        for number in itertools.count():
            yield number

    def at_exit(self) -> int:
        """Register an exit function that does not return."""
        atexit.register(self.never.wait)
        return os.getpid()

    def forever(self) -> None:
        """Wait for ever."""
        self.never.wait()


@pytest.mark.slow
async def test_an_exit_function_that_hangs_is_cut_off() -> None:
    async with asyncio.timeout(PATIENCE), zc.init(config=config(0.5)):
        first: Any = await Endless.spawn()
        second: Any = await Endless.spawn()
        pids = [await first.at_exit(), await second.at_exit()]
        await zc.stop(first)
        assert not alive(pids[0])
    assert not alive(pids[1])


@pytest.mark.slow
async def test_exit_functions_of_other_processes_are_theirs(tmp_path: Path) -> None:
    """A worker is a fork: it leaves alone what its forebears remove at their ends."""
    left = tmp_path / "left"
    atexit.register(left.touch)
    try:
        async with zc.init(config=config()):
            await zc.stop(await Endless.spawn())
    finally:
        atexit.unregister(left.touch)
    assert not left.exists()


@zc.actor
class Worker:
    """An actor that leaves a file for each call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def work(self) -> None:
        """Leave a file."""
        (self.folder / str(self.count)).touch()
        self.count += 1

    async def fail(self) -> None:
        """Raise, once the block has ended."""
        await asyncio.sleep(0.2)
        raise ValueError("too late")

    async def wait(self, seconds: float) -> None:
        """Keep the queue waiting."""
        await asyncio.sleep(seconds)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The lines of the log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zcactor")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.mark.slow
@pytest.mark.parametrize("detached", [False, True])
async def test_queued_calls_run_at_the_end_of_an_embedded_node(tmp_path: Path, told: list[str], detached: bool) -> None:
    async with zc.init(config=config()):
        of_its_own = Worker.options(name="w", lifetime="detached") if detached else Worker
        worker: Any = await of_its_own.spawn(tmp_path)
        kept = [worker.work() for _ in range(5)]
        for _ in range(5):
            worker.work()
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(count) for count in range(10)]
    assert told == []
    del kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "1 call that had not ended: Endless.forever (await it)"),
        (5, "5 calls that had not ended: Endless.forever x5 (await them)"),
    ],
)
async def test_the_end_tells_what_has_not_run(told: list[str], count: int, text: str) -> None:
    async with zc.init(config=config(0.5, warn_after=0.0)):
        actor: Any = await Endless.spawn()
        kept = [actor.forever() for _ in range(count)]
    assert told == [f"ended with {text}"]
    del kept


@pytest.mark.slow
async def test_the_end_tells_how_streams_end(told: list[str]) -> None:
    async with zc.init(config=config(0.5, warn_after=0.0)):
        actor: Any = await Endless.spawn()
        stream = actor.numbers()
        assert await anext(stream) == 0
    (line,) = told
    assert line.startswith("ended with 1 call that had not ended: Endless.numbers (await it; a stream ends with its")
    del stream


@pytest.mark.slow
async def test_the_end_tells_of_late_failures(tmp_path: Path, told: list[str]) -> None:
    async with zc.init(config=config(warn_after=0.0)):
        first: Any = await Worker.spawn(tmp_path)
        second: Any = await Worker.spawn(tmp_path)
        first.fail()
        kept = second.fail()
    assert told == ["Worker.fail failed and its result was never awaited: ValueError: too late"] * 2
    del kept


@pytest.mark.slow
async def test_an_end_without_calls_says_nothing(tmp_path: Path, told: list[str]) -> None:
    async with zc.init(config=config()):
        worker: Any = await Worker.spawn(tmp_path)
        await worker.work()
    assert told == []


LEFT = """
import asyncio
import zcactor as zc

@zc.actor
class Idle:
    def ping(self):
        return "pong"

async def main():
    await zc.init()
    idle = [await Idle.spawn() for _ in range(2)]
    print(*[await each.ping() for each in idle])
    if END:
        await zc.shutdown()
    globals().update(idle=idle)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_program_that_leaves_its_actors_is_told_so(tmp_path: Path, ends: bool) -> None:
    program = tmp_path / "program.py"
    program.write_text(LEFT.replace("END", str(ends)))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "pong pong\n"
    said = "" if ends else "the program ended without zc.shutdown(): 2 actors ended at once"
    assert done.stderr.startswith(said) and len(done.stderr.splitlines()) == (not ends), done.stderr
