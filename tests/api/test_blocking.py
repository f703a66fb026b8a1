"""Programs without an event loop: operations that block, the runtime in a thread of its own, and its end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from math import nan
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.actors import Plain, Probe
from tests.driver.programs import Program, until

PATIENCE = 60.0


class Holding:
    def __init__(self, value: Any) -> None:
        self._value = value

    def value(self) -> Any:
        return self._value

    def count(self, number: int) -> Iterator[int]:
        yield from range(number)

    async def held(self) -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()


@pytest.fixture(scope="module")
def node() -> Iterator[Any]:
    """The runtime of a program that has no event loop."""
    with zc.init(num_cpus=4) as runtime:
        yield runtime


@pytest.fixture
def probe(node: Any) -> Any:
    return Probe.spawn().result()


# ---- in a thread without an event loop


def test_everything_that_is_awaited_has_a_result(node: Any) -> None:
    plain: Any = zc.spawn(Plain).result(PATIENCE)
    named: Any = Plain.options(name="blocking", num_cpus=0).spawn().result()
    assert plain.echo(1).result() == 1
    assert zc.get_actor("blocking").result() == named
    assert zc.get([plain.echo(value) for value in range(3)]).result() == [0, 1, 2]
    done, pending = zc.wait([plain.echo(1), plain.echo(2)], num_returns=2).result()
    assert (len(done), pending) == (2, [])
    assert [each.node_id for each in zc.nodes().result()] == [node.node_id]
    assert {each.name for each in zc.actors().result()} >= {"blocking"}
    assert zc.cluster_resources().result()["CPU"] == 4 >= zc.available_resources().result()["CPU"]
    assert zc.stats(plain).result().calls >= 0
    assert zc.explain(plain).result().transport == "local"
    assert zc.stop(named).result() is None
    assert zc.kill(plain).result() is None
    with pytest.raises(zc.ActorDied):
        plain.echo(1).result()
    with pytest.raises(zc.NoSuchActor):
        zc.get_actor("blocking").result()


def test_groups_and_graphs_are_made_without_a_loop(node: Any) -> None:
    plains: list[Any] = [Plain.spawn().result() for _ in range(2)]
    group = zc.group(plains).result()
    assert group.size == 2
    assert group.explain(8).result().plan
    assert group.reform().result().size == 2


def test_arrays_of_the_thread_are_born_in_the_store(node: Any) -> None:
    plain: Any = Plain.spawn().result()
    before = zc.stats().bytes_copied
    assert plain.echo(np.ones(1 << 20)).result().sum() == 1 << 20
    assert zc.stats().bytes_copied == before


def test_it_begins_at_the_call(node: Any) -> None:
    plain: Any = Plain.spawn().result()
    zc.kill(plain)  # nobody waits for that
    until(lambda: isinstance(plain.echo(1).exception(), zc.ActorDied), "the actor to end")
    array = np.zeros(3)
    spawning = zc.spawn(Holding, array)
    array = array + 1  # an array that was passed is closed, and a list is as it was
    items = [1]
    other = zc.spawn(Holding, items)
    items.append(2)
    assert spawning.result().value().result().tolist() == [0, 0, 0]
    assert other.result().value().result() == [1]


def test_a_reference_among_the_arguments_of_a_spawn(node: Any) -> None:
    plain: Any = Plain.spawn().result()
    assert zc.spawn(Holding, plain.echo(5)).result().value().result() == 5
    with pytest.raises(ValueError, match="early"):
        zc.spawn(Holding, plain.fail("early")).result()


def test_the_outcome_of_an_operation(node: Any, probe: Any) -> None:
    plain: Any = Plain.spawn().result()
    assert plain.echo(1).exception() is None
    assert isinstance(plain.fail("bad").exception(PATIENCE), ValueError)
    missing = zc.get_actor("nobody")
    assert isinstance(missing.exception(), zc.NoSuchActor)
    assert missing.done() and not missing.cancel()
    held = probe.ahold("outcome")
    waiting = zc.get([held])
    each: Any
    for each in (held, waiting):
        assert not each.done()
        for block in (each.result, each.exception):
            with pytest.raises(TimeoutError, match="was not done after 0.01 s; it goes on"):
                block(0.01)
            with pytest.raises(TypeError):
                block("1")
            with pytest.raises(ValueError, match="-1"):
                block(-1)
            with pytest.raises(ValueError, match="nan"):
                block(nan)
    assert waiting.cancel()
    for block in (waiting.result, waiting.exception):
        with pytest.raises(asyncio.CancelledError):
            block(PATIENCE)
    assert not held.done()  # `get` held it, too
    probe.open("outcome").result()
    assert held.result() == "outcome"


def test_callbacks_and_futures(node: Any, probe: Any, caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[Any, str]] = []
    came = threading.Semaphore(0)

    def note(operation: Any) -> None:
        told.append((operation, threading.current_thread().name))
        came.release()

    held = probe.ahold("callback")
    waiting = zc.get([held])
    for operation in (held, waiting):
        operation.add_done_callback(lambda _: 1 // 0)
        operation.add_done_callback(note)
    futures = [held.future(), waiting.future()]
    assert concurrent.futures.wait(futures, timeout=0).not_done == set(futures)
    assert not told
    probe.open("callback").result()
    assert concurrent.futures.wait(futures, PATIENCE).not_done == set()
    assert [each.result() for each in futures] == ["callback", ["callback"]]
    for _ in range(2):
        assert came.acquire(timeout=PATIENCE)
    assert sorted((type(each).__name__, name) for each, name in told) == [
        ("Background", "zcactor-loop"),
        ("ObjectRef", "zcactor-loop"),
    ]
    assert "ZeroDivisionError" in caplog.text
    held.add_done_callback(note)  # at once
    assert told[-1] == (held, threading.current_thread().name)
    assert isinstance(zc.get_actor("nobody").future().exception(PATIENCE), zc.NoSuchActor)


def test_a_failure_that_nobody_sees_is_logged_once(node: Any, caplog: pytest.LogCaptureFixture) -> None:
    zc.get_actor("nobody at all")
    until(lambda: "never awaited" in caplog.text, "the log line")
    (record,) = [each for each in caplog.records if "never awaited" in each.message]
    assert record.message.startswith("zc.get_actor failed and its result was never awaited: ")
    assert record.levelno == logging.ERROR


def test_many_threads_at_once(node: Any) -> None:
    plain: Any = Plain.spawn().result()

    def work(number: int) -> list[int]:
        values = [plain.echo(number * 100 + each) for each in range(50)]
        return [*zc.get(values[:25]).result(), *(value.result(PATIENCE) for value in values[25:])]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(16)))
    assert found == [[number * 100 + each for each in range(50)] for number in range(16)]


def test_a_thread_with_a_loop_of_its_own(node: Any, probe: Any) -> None:
    """The runtime's loop is in another thread."""

    async def main() -> None:
        plain: Any = await Plain.spawn()
        assert await plain.echo(1) == 1
        assert await zc.get([plain.echo(2)]) == [2]
        assert await asyncio.gather(zc.get([plain.echo(3)]), plain.echo(4)) == [[3], 4]
        held = probe.ahold("elsewhere")
        waiting = zc.get([held])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting, 0.01)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(RuntimeError, match="would block the event loop"):
            plain.echo(1).result()
        probe.open("elsewhere")
        assert await held == "elsewhere"

    asyncio.run(main())


def test_streams(node: Any, probe: Any) -> None:
    plain: Any = zc.spawn(Holding, None).result()
    assert list(plain.count(40)) == list(range(40))
    stream = plain.count(3)
    assert stream.next() == 0
    assert next(stream) == 1
    stream.close()
    with pytest.raises(StopIteration):
        stream.next(0)
    for wrong, error in (("1", TypeError), (-1, ValueError), (nan, ValueError)):
        with pytest.raises(error):
            plain.count(3).next(wrong)
    held = plain.held()
    assert held.next(PATIENCE) == 1
    for seconds in (0, 0.01):
        with pytest.raises(TimeoutError, match="the next item of Holding.held was not there"):
            held.next(seconds)
    failing = plain.count("x")
    with pytest.raises(TypeError, match="'str' object"):
        list(failing)
    with pytest.raises(StopIteration):
        next(failing)


# ---- programs


SCRIPT = """
import zcactor as zc
with zc.init(num_cpus=2) as runtime:
    busy = zc.spawn(Busy).result()
    tell(pid=busy.pid().result(), node=runtime.node_id)
    {body}
tell(threads=[thread.name for thread in threading.enumerate()])
zc.init(num_cpus=2).result()
tell(second=zc.spawn(Busy).result().pid().result())
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["zc.shutdown().result()", "", "sys.exit(3)", "1 / 0"])
def test_a_script(end: str) -> None:
    with Program(SCRIPT.format(body="pass", end=end)) as program:
        assert program.told("pid") != program.pid
        assert program.told("threads") == ["MainThread"]
        assert program.told("second")
        assert program.status() == {"sys.exit(3)": 3, "1 / 0": 1}.get(end, 0)
        program.assert_clean()


@pytest.mark.slow
@pytest.mark.parametrize("body", ["busy.wait().result()", "zc.get([busy.wait()]).result()", "list(busy.forever())"])
def test_ctrl_c_breaks_a_wait_and_ends_all(body: str) -> None:
    source = SCRIPT.format(body=f"tell(ready=1)\n    {body}", end="").replace(
        "with zc.init", "async def forever(self):\n    await asyncio.Event().wait()\n    yield\n"
        "Busy.forever = forever\nwith zc.init", 1
    )  # fmt: skip
    with Program(source) as program:
        program.told("ready")
        until(lambda: _sleeps(program.pid), "the main thread to wait")
        program.process.send_signal(signal.SIGINT)
        assert program.status() == -signal.SIGINT
        assert "KeyboardInterrupt" in program.stderr()
        program.assert_clean()


def _sleeps(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "S"


@pytest.mark.slow
def test_waits_of_other_threads_end_with_the_runtime() -> None:
    source = """
import zcactor as zc
ended = []
def wait():
    try:
        ended.append(call.result())
    except BaseException as error:
        ended.append(type(error).__name__)
with zc.init(num_cpus=2, shutdown_timeout=0.2):
    busy = zc.spawn(Busy).result()
    call = busy.wait()
    waiting = threading.Thread(target=wait)
    waiting.start()
waiting.join(30)
tell(ended=ended)
"""
    with Program(source) as program:
        assert program.told("ended") in (["ActorDied"], ["ConnectionLost"])
        assert program.status() == 0
        program.assert_clean()


@pytest.mark.slow
def test_an_init_that_is_not_ready_in_time_leaves_nothing() -> None:
    source = """
import zcactor as zc
for seconds in (0, 0.001, 0.02, 0.1):
    try:
        zc.init(num_cpus=2).result(seconds)
    except TimeoutError as error:
        tell(late=str(error))
    else:
        tell(late="ready")
        zc.shutdown().result()
try:
    zc.init(num_cpus=2).result(-1)
except ValueError:
    pass
tell(threads=threading.active_count())
with zc.init(num_cpus=2):
    tell(value=zc.spawn(Busy).result().pid().result())
"""
    with Program(source) as program:
        assert program.told("late") == "zc.init() was not ready after 0 s, and was ended"
        assert program.told("threads") == 1
        assert program.told("value") != program.pid
        assert program.status() == 0
        program.assert_clean()
