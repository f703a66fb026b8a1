"""Copies of arrays on GPUs: from a GPU that the reader does not see, and in pieces through host memory."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import numpy as np
import pytest
import uvloop

import zcactor as zc
from tests.actors_gpu import Gpus, hold_pieces
from tests.callers import asked_by
from tests.device.helpers import held, settle
from zcactor.device.staging import PIECE_NBYTES, PIECES
from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.objects.device_pieces import DevicePieces
from zcactor.objectstore.copies import CopyCount
from zcactor.process.context import current
from zcactor.testing import until

pytestmark = pytest.mark.slow
LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}
"""One loop: nothing here depends on its kind, and each test starts a runtime."""
MIB = 1 << 20
HOST = "through host memory"
LARGE = 6 * PIECE_NBYTES + 12_345
"""Bytes of an array: several pieces, the last of which is not whole."""
SMALL_STORE = 20 * MIB
"""A store that has room for all pieces, and not for that array."""


def running(options: str = "", **more: Any) -> AbstractAsyncContextManager[Any]:
    return zc.init(config=zc.Config(gpu=f"fake:{options}", **more))


async def spawned(visible: str | None = None) -> Any:
    """An actor that sees some GPUs, by default all."""
    return await Gpus.options(env={} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}).spawn()


def pieces() -> DevicePieces:
    process: Any = current()
    found: DevicePieces = process.resolver.devices.pieces
    return found


def values_of(nbytes: int) -> Any:
    return np.random.default_rng(7).integers(0, 256, nbytes, np.uint8)


async def given_back() -> None:
    """Wait until nothing is used or leased any more, and all pieces are back."""
    await until(lambda: zc.stats().leases == zc.stats().device_used == 0, "everything is given back")
    await until(lambda: pieces().nbytes == pieces().idle_nbytes, "all pieces are back")


WAYS = {
    "hidden GPU": ("devices=2,peer=none", "1", "local,verbs,tcp"),
    "no export": ("export=none", None, "local,verbs,tcp"),
    "another host": ("", None, "tcp"),
}


@pytest.mark.parametrize("way", WAYS)
async def test_an_array_that_is_larger_than_both_stores(way: str) -> None:
    options, visible, transports = WAYS[way]
    async with running(f"{options},late=1", store_capacity=SMALL_STORE, transports=transports):
        actor = await spawned(visible)
        values = values_of(LARGE)
        x = zc.gpu.to_device(values)
        here, (there, *_) = current().store.heap.high, await actor.arena()
        await actor.keep(x)
        high, kept, _ = await actor.arena()
        both = (current().store.heap.high - here, pieces().nbytes), (high - there, kept)
        most = PIECES * PIECE_NBYTES
        assert 0 < both[0][1] <= most and both[1][1] <= most
        assert all(grown <= 16 * MIB for grown, _ in both)
        back = await actor.kept()
        assert type(back) is zc.gpu.DeviceArray and back.readonly
        target = np.empty(LARGE, np.uint8)  # the store has no room for it
        back.copy_to_host(target)
        assert np.array_equal(target, values)
        times = 1 if visible else 2  # there, and the copy of it back where that cannot be mapped either
        assert zc.stats().copies[HOST] == CopyCount(times, times * LARGE)
        assert (await actor.stats()).copies[HOST] == CopyCount(times, times * LARGE)
        del x, back
        await actor.keep(None)
        await given_back()
        assert zc.stats().store_used == 0


@pytest.mark.parametrize("transports", ["local", "tcp"])
async def test_pieces_are_pinned_and_stay_so_after_a_fork(transports: str) -> None:
    async with running("export=none", transports=transports):
        actor = await spawned()
        driver: Any = current().store.devices().driver
        values = values_of(LARGE)
        for forked in (False, True):
            child = os.fork() if forked else 0
            if forked and not child:
                signal.pause()  # it sees the pages of this moment, while it lives
            x, before = zc.gpu.to_device(values[::-1] if forked else values), driver.copied.copy()
            await actor.keep(x)
            back = await actor.kept()
            there, mapped = (
                2 * LARGE,
                LARGE if transports == "local" else 0,
            )  # only its owner has pinned it
            assert driver.copied - before == +Counter(pinned=there - mapped, pageable=mapped)
            assert np.array_equal(zc.gpu.to_host(back), values[::-1] if forked else values)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("transports", ["local", "tcp"])
async def test_the_loop_makes_no_copy_for_which_cuda_waits(transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running("export=none", transports=transports):
        actor, loop = await spawned(), threading.get_ident()
        driver: Any = current().store.devices().driver
        copy, waits = driver.copy, list[int]()

        def watched(*args: Any) -> None:
            before = driver.copied["pageable"]
            copy(*args)
            if threading.get_ident() == loop:
                waits.append(driver.copied["pageable"] - before)

        x = zc.gpu.to_device(values_of(LARGE))
        monkeypatch.setattr(driver, "copy", watched)
        await actor.keep(x)
        assert (await actor.kept()).nbytes == LARGE
        assert len(waits) >= LARGE // PIECE_NBYTES and not any(waits)


@pytest.mark.parametrize("transports", ["local", "tcp"])
async def test_a_process_without_a_gpu(transports: str) -> None:
    async with running("late=1", transports=transports):
        actor = await spawned("")
        values = values_of(LARGE)
        x = zc.gpu.to_device(values)
        _, seen = await actor.seen(x)
        assert np.array_equal(seen, values)
        assert zc.stats().copies[HOST] == CopyCount(1, LARGE)
        assert HOST not in (await actor.stats()).copies
        assert (pieces().nbytes > 0) == (transports == "tcp")
        del x, seen
        await given_back()


async def test_a_process_without_a_gpu_where_the_owner_has_no_room() -> None:
    async with running("late=1", store_capacity=64 * MIB):
        owner, reader = await spawned(), await spawned("")
        made = await owner.full(LARGE, 7)
        await owner.fill_store(3 * PIECE_NBYTES)
        kind, total = await reader.total(made)
        assert (kind, total) == ("ndarray", 7 * LARGE)
        assert (await owner.stats()).copies[HOST] == CopyCount(1, LARGE)
        assert (await reader.stats()).copies[HOST] == CopyCount(1, LARGE)


async def test_one_copy_serves_all_that_have_it() -> None:
    async with running("export=none"):
        actor = await spawned()
        x = zc.full(1000, 5, "u1", device="cuda")
        await actor.keep([x, x[::2], x])
        assert (await actor.seen(x))[1].sum() == 5000
        assert zc.stats().copies[HOST] == (await actor.stats()).copies[HOST] == CopyCount(2, 1999)
        other = await spawned()
        assert (await actor.relay_kept(other))[1].sum() == 5000
        assert (await other.stats()).copies[HOST] == CopyCount(1, 1000)
        assert zc.stats().copies[HOST].count == 2  # the actor passes its own copy on
        await actor.keep(None)
        assert (await actor.seen(x))[1].sum() == 5000
        assert (await actor.stats()).copies[HOST].count == 4


async def test_from_a_gpu_that_the_reader_does_not_see() -> None:
    async with running("devices=2,late=2"):
        actor = await spawned("1")
        there = await actor.full(10, 1)
        assert there.uuid == zc.gpu.gpus()[1].uuid
        x = zc.gpu.to_device(np.arange(10_000, dtype="i4"))[::-2]
        with zc.gpu.stream() as stream, held(current().store.devices().driver, stream.ptr):
            y = zc.zeros(1000, "u1", device="cuda")
            y.fill(9)
            later = actor.seen(y)  # comes when it is computed
        assert (await later)[1].sum() == 9000
        for _ in range(2):
            await actor.keep([x, y])
            assert np.array_equal((await actor.kept_seen())[0], np.arange(10_000, dtype="i4")[::-2])
        facts = await actor.facts(x)
        assert facts[3:] == ("cuda:0", there.uuid, True)
        stats = await actor.stats()
        assert stats.bytes_device_pulled == 39_996 + 2000 and stats.bytes_device_mapped == 0
        assert HOST not in stats.copies and HOST not in zc.stats().copies
        assert "read-only" in await actor.writes(x)
        assert (await actor.filled(zc.move(zc.zeros(100, "u1", device="cuda")), 4) == 4).all()
        assert "moved array on a GPU" not in (await actor.stats()).copies
        del x, y
        await actor.keep(None)
        await until(lambda: zc.stats().leases == 0, "all leases are back")


async def test_a_result_that_is_only_passed_on_is_not_copied_here() -> None:
    async with running("late=1", transports="tcp"):
        owner, reader = await spawned(), await spawned()
        result = owner.full(LARGE, 2)
        assert await reader.total(result) == ("DeviceArray", 2 * LARGE)
        assert HOST not in zc.stats().copies
        assert zc.gpu.to_host(await result).sum(dtype="u8") == 2 * LARGE
        assert zc.stats().copies[HOST] == CopyCount(1, LARGE)
        del result
        await given_back()
        dropped = owner.full(1000, 2)
        await until(dropped.done, "the result has come")
        del dropped
        await until_there(partial(_uses_nothing, owner), "the result that nobody read is freed")
        assert zc.stats().copies[HOST] == CopyCount(1, LARGE)


async def _uses_nothing(actor: Any) -> bool:
    return bool((await actor.stats()).device_used == 0)


async def test_a_result_that_was_not_read_ends_with_its_owner() -> None:
    async with running(transports="tcp"):
        owner, reader = await spawned(), await spawned()
        result = owner.full(1000, 2)
        await until(result.done, "the result has come")
        await zc.kill(owner)
        for wanted in (result, reader.total(result)):
            with pytest.raises((ObjectLost, zc.ActorDied)):
                await wanted


# ---- failures


async def test_the_reader_dies_in_the_middle_of_a_piece() -> None:
    async with running("export=none"):
        reader = await spawned()
        x = zc.full(LARGE, 3, "u1", device="cuda")
        zc.gpu.to_host(x[:1])
        gate, driver = threading.Event(), current().store.devices().driver
        hold_pieces(current(), gate)
        call = reader.keep(x)
        await until(lambda: pieces().nbytes == PIECES * PIECE_NBYTES, "the copies of two pieces are queued")
        await zc.kill(reader)
        with pytest.raises(zc.ActorDied):
            await call
        gate.set()
        settle(driver)
        await until(lambda: pieces().idle_nbytes == PIECES * PIECE_NBYTES, "the pieces are back")
        other = await spawned()
        assert (await other.total(x))[1] == 3 * LARGE
        del x
        await given_back()


async def until_there(question: Callable[[], Awaitable[Any]], message: str) -> None:
    """Wait until the answer of an actor is true."""
    end = asyncio.get_running_loop().time() + 60
    while not await question():
        assert asyncio.get_running_loop().time() < end, message


@pytest.mark.parametrize("transports", ["local", "tcp"])
async def test_the_owner_dies_in_the_middle_of_a_piece(transports: str) -> None:
    async with running("export=none", transports=transports):
        owner, reader = await spawned(), await spawned()
        await reader.hold_pieces()
        call = reader.total(owner.full(LARGE, 3))
        holder = owner if transports == "local" else reader  # over TCP an owner has a piece back once it was read

        async def are_staged() -> bool:
            return bool((await holder.arena())[2] == PIECES * PIECE_NBYTES)

        async def holds_nothing() -> bool:
            return bool((await reader.stats()).device_used == 0 == (await reader.arena())[2])

        await until_there(are_staged, "two pieces are under way")
        await zc.kill(owner)
        with pytest.raises((ObjectLost, zc.ActorDied)):
            await asyncio.gather(call, reader.let_go())
        await until_there(holds_nothing, "the reader has given everything back")
        assert (await reader.total(zc.full(LARGE, 1, "u1", device="cuda")))[1] == LARGE


@pytest.mark.parametrize("kept", [None, ConnectionLost("as of a session that has ended", True)])
async def test_an_error_keeps_no_memory(monkeypatch: pytest.MonkeyPatch, kept: Exception | None) -> None:
    async with running("export=none", transports="tcp"):
        owner = await spawned()

        async def late(*_: object) -> None:
            if kept is not None:
                raise kept
            async with asyncio.timeout(0):  # its error refers to the task
                await asyncio.Event().wait()

        gc.collect()
        gc.disable()  # memory that only the collector gives back stays
        try:
            with monkeypatch.context() as patch:
                patch.setattr(current().locations, "fetch", late)
                with pytest.raises(ObjectLost, match="could not be copied here"):
                    await owner.full(LARGE, 3)
            await given_back()
            assert zc.gpu.to_host(await owner.full(LARGE, 1)).sum() == LARGE
        finally:
            gc.enable()


FAILURES = ["copy:2", "record:2", "record:3", "stream", "pin", "event:65", "create", "map", "done:2", "idle"]
"""Calls of a driver, each of which fails once in either process. The array's own are before some of them."""


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_call_that_fails_once_is_a_clear_error(failure: str) -> None:
    async with running(f"export=none,fail={failure}"):
        actor = await spawned()
        failed, done = list[str](), 0
        while done < 2:
            try:
                x: Any = zc.full(PIECE_NBYTES + 5, 7, "u1", device="cuda")
                assert (await actor.total(x))[1] == 7 * (PIECE_NBYTES + 5)
                done += 1
            except (zc.DeviceError, ObjectLost) as error:
                failed.append(str(error))
            x = None
        assert len(failed) <= 2  # at most once in each process
        assert all(failure.split(":")[0] in each for each in failed)
        await given_back()


class Connected:
    """A session of which a twin may take the place."""

    def __init__(self) -> None:
        self.in_use: Any = self
        self.is_replaced = False

    def replace(self, twin: Any) -> None:
        self.in_use, self.is_replaced = twin, True


async def test_a_question_goes_on_by_the_connection_that_replaces_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[Any] = [Connected() for _ in range(3)]
    asked = list[tuple[Any, ...]]()

    async def ask(session: Any, *question: Any) -> str:
        asked.append((session, *question))
        if len(asked) < 3:
            session.replace(sessions[len(asked)])
            raise ConnectionLost("a twin takes its place")
        if len(asked) > 3:
            raise ConnectionLost("the peer has ended")
        return "answer"

    async with running():
        monkeypatch.setattr(pieces()._requests, "ask", ask)
        found: Any = await pieces().asked(sessions[0], DevicePieces.computed, 1)
        assert found == (sessions[2], "answer")
        assert asked == [(session, DevicePieces.computed, 1) for session in sessions]
        with pytest.raises(ConnectionLost, match="has ended"):
            await pieces().asked(sessions[2], DevicePieces.computed, 1)
        monkeypatch.undo()


async def test_bytes_need_a_lease() -> None:
    async with running():
        actor = await spawned()
        x = zc.full(2 * PIECE_NBYTES, 3, "u1", device="cuda")
        process: Any = current()
        block: Any = x.holder
        for session in process.sessions.all():
            for asked in (
                asked_by(session, pieces().stage(block.id, block.offset, 1000, True)),
                asked_by(session, pieces().whole(block.id, block.offset, 1000)),
                asked_by(session, pieces().computed(block.id)),
            ):
                with pytest.raises(ObjectLost, match="is leased to the process"):
                    await asked
        await actor.keep(x)
        (session,) = [each for each in process.sessions.all() if each.leases.get(block.id) is not None]
        for offset, nbytes in ((0, 2 * PIECE_NBYTES + 1), (-1, 5), (1, -1), (1, 2 * PIECE_NBYTES)):
            place = block.offset + offset
            for asked in (
                asked_by(session, pieces().stage(block.id, place, nbytes, True)),
                asked_by(session, pieces().whole(block.id, place, nbytes)),
            ):
                with pytest.raises(ObjectLost, match="with these bytes"):
                    await asked
        with pytest.raises(ProtocolError, match=f"at most {PIECE_NBYTES}"):
            await asked_by(session, pieces().stage(block.id, block.offset, PIECE_NBYTES + 1, True))
        assert HOST not in zc.stats().copies and pieces().nbytes == 0
        values = await asked_by(session, pieces().whole(block.id, block.offset + 10, 5))
        assert bytes(values) == b"\3" * 5
        await asked_by(session, pieces().computed(block.id))
