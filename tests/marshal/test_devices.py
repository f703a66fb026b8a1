"""Arrays on GPUs from actor to actor: by reference, in order, through host memory where nothing else works."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest
import uvloop

import zcactor as zc
from tests.actors_gpu import Box, Gpus
from tests.descriptors import opened
from tests.device.helpers import held
from tests.marshal.wire import assert_same
from zcactor.device.fake.gpu import CALLS
from zcactor.device.imports import OpenEvent
from zcactor.errors import ProtocolError
from zcactor.marshal.devices import _last, unpack_device_array
from zcactor.marshal.unpacking import Unpacking
from zcactor.marshal.values import encode
from zcactor.native import hot
from zcactor.objects import device_direct
from zcactor.objects.locations import LostPart
from zcactor.objectstore.copies import CopyCounter
from zcactor.objectstore.ref import RegionKind
from zcactor.process.context import current
from zcactor.rpc.parts import Part
from zcactor.testing import until

pytestmark = pytest.mark.slow
LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}
"""One loop: nothing here depends on its kind, and each test starts a runtime."""


def running(options: str = "devices=2,late=2", **more: Any) -> AbstractAsyncContextManager[Any]:
    return zc.init(config=zc.Config(gpu=f"fake:{options}", **more))


def driver() -> Any:
    """The driver of this process's fake GPUs."""
    return current().store.devices().driver


async def spawned(env: dict[str, str] | None = None) -> Any:
    """An actor, whose methods are not typed here: each call is awaited."""
    return await Gpus.options(env=env or {}).spawn()


async def test_arguments_and_results_by_reference() -> None:
    values = np.arange(60_000, dtype="i4").reshape(200, 300)
    async with running():
        actor = await spawned()
        x = zc.gpu.to_device(values, "cuda:1")
        for part, expected in (
            (x, values),
            (x[3:50, ::7], values[3:50, ::7]),
            (x.T[1], values.T[1]),
            (x[::-1, ::-2], values[::-1, ::-2]),
            (x[:0], values[:0]),
            (x[5, 6], values[5, 6, ...]),
        ):
            kind, seen = await actor.seen(part)
            assert kind == "DeviceArray"
            assert_same(seen, np.asarray(expected))
            assert_same((await actor.seen_on_loop(part))[1], np.asarray(expected))
        assert await actor.facts(x.T) == ((300, 200), np.dtype("i4"), (4, 1200), "cuda:1", x.uuid, True)
        made = await actor.full((10, 20), 7)
        assert type(made) is zc.gpu.DeviceArray and made.readonly and zc.in_store(made) and zc.in_store(x)
        assert (zc.gpu.to_host(made) == 7).all()
        assert zc.stats().bytes_device_mapped == 200 and zc.stats().device_extents == 1
        stats = await actor.stats()
        assert stats.bytes_device_mapped >= 3 * values.nbytes and stats.device_extents == 1
        assert set(stats.copies) == {"zc.gpu.to_host"}
        assert set(zc.stats().copies) == {"zc.gpu.to_device", "zc.gpu.to_host"}


async def test_inside_of_other_things() -> None:
    async with running():
        actor = await spawned()
        x = zc.full(1000, 3, "u1", device="cuda")
        await actor.keep({"a": [x, (x[5:], 1)], "b": Box("c", x)})
        back = await actor.kept()
        for each in (back["a"][0], back["a"][1][0], back["b"].array):
            assert type(each) is zc.gpu.DeviceArray and (zc.gpu.to_host(each) == 3).all()
        ref = zc.put(x)
        assert (await actor.seen(ref))[1].sum() == 3000
        assert (zc.gpu.to_host(await ref) == 3).all()
        assert (await actor.seen(actor.full(10, 9)))[1].sum() == 90
        values = [int(zc.gpu.to_host(each)[0]) async for each in actor.many(5)]
        assert values == [0, 1, 2, 3, 4]
        assert set(zc.stats().copies) == {"zc.gpu.to_host"}


async def test_passed_on_in_the_owners_name() -> None:
    async with running():
        first, second = await spawned(), await spawned()
        x = zc.full(1000, 5, "u1", device="cuda")
        assert (await first.relay(second, x))[1].sum() == 5000
        made = await first.full(1000, 6)
        assert (await second.seen(made))[1].sum() == 6000
        assert (await first.relay(second, made[::2]))[1].sum() == 3000
        assert (await second.stats()).device_extents == 2
        assert (await second.stats()).copies.keys() == {"zc.gpu.to_host"}


async def test_only_extents_with_arrays_are_mapped_and_those_that_are_gone_are_unmapped() -> None:
    async with running("memory=1GiB", device_keep_nbytes=0), asyncio.timeout(60):
        actor, another = await spawned(), await spawned()

        async def mapped(*wanted: int) -> None:
            """Wait until the actors map so many extents each."""
            while [(await each.stats()).device_extents for each in (actor, another)] != [*wanted]:
                pass

        made = [zc.full(1 << 26, number, "u1", device="cuda") for number in range(4)]
        assert (await actor.seen(made[2][:4096]))[1].sum() == 2 * 4096
        await mapped(1, 0)
        before = opened()
        await actor.keep([made[1][5:], made[3]])
        await another.keep([made[3]])
        await mapped(3, 1)
        assert opened() <= before, "no extent has a descriptor"
        made.clear()
        await mapped(2, 1)
        await actor.keep(None)
        await mapped(1, 1)
        assert zc.stats().device_used == 1 << 26
        assert (await another.kept_seen())[0][:5].sum() == 15
        await another.keep(None)
        await mapped(0, 0)
        assert not zc.stats().device_used


async def test_the_same_process_gets_the_object_itself() -> None:
    async with running():
        x = zc.full(1000, 5, "u1", device="cuda")
        ref = zc.put(x)
        assert (zc.gpu.to_host(await ref) == 5).all()
        assert zc.stats().device_extents == 0 and zc.stats().device_used == 1024


async def test_read_only_once_it_was_passed() -> None:
    async with running():
        actor = await spawned()
        x = zc.zeros(100, device="cuda")
        x.fill(2)
        view = x[5:]
        assert "read-only" in await actor.writes(x)
        for each in (x, view):
            with pytest.raises(ValueError, match=r"x\.copy\(\)"):
                each.fill(1)
        mine = (await actor.full(10, 1)).copy()
        mine.fill(4)
        assert (zc.gpu.to_host(mine) == 4).all()


async def test_moved_arrays() -> None:
    async with running():
        actor = await spawned()
        values = np.arange(6000, dtype="i4").reshape(200, 30)
        x = zc.gpu.to_device(values)[::-1]
        assert (await actor.filled(zc.move(x), 5) == 5).all()
        assert (await actor.stats()).copies["moved array on a GPU"].nbytes == values.nbytes
        assert "handed over" in repr(x) and x.shape == (200, 30)
        for use in (
            lambda: x.fill(1),
            lambda: zc.gpu.to_host(x),
            x.copy,
            lambda: actor.seen(zc.move(x)),
            lambda: x.device,
        ):
            with pytest.raises(ValueError, match="handed over"):
                await actor.seen(use())
        back = await actor.given(100, 8)
        back.fill(9)
        assert (zc.gpu.to_host(back) == 9).all() and zc.stats().copies["moved array on a GPU"].count == 1
        y = zc.ones(10, "u1", device="cuda")
        await actor.keep([{"y": Box("b", zc.move(y))}])
        kept = (await actor.kept())[0]["y"].array
        with pytest.raises(ValueError, match="handed over"):
            y.fill(0)
        assert (zc.gpu.to_host(kept) == 1).all()


async def test_what_cannot_be_moved() -> None:
    async with running():
        actor = await spawned()
        x = zc.zeros((10, 10), device="cuda")
        view = x[1:]
        with pytest.raises(ValueError, match="other views"):
            await actor.seen(zc.move(x))
        del view
        with pytest.raises(ValueError, match="other views"):
            await actor.relay(zc.move(x), zc.move(x))
        unpicklable = (zc.move(x), threading.Lock())
        with pytest.raises(TypeError, match="pickle"):
            await actor.keep(unpicklable)
        x.fill(3)  # nothing was sent: it is as before
        assert (await actor.seen(x))[1].sum() == 300
        with pytest.raises(ValueError, match="read-only"):
            await actor.seen(zc.move(x))


async def test_what_was_not_sent_comes_back() -> None:
    async with running():
        actor = await spawned()
        await zc.kill(actor)
        x = zc.zeros(10, "u1", device="cuda")
        with pytest.raises(zc.ActorDied) as caught:
            await actor.seen(zc.move(x))
        assert not caught.value.maybe_executed
        x.fill(4)
        other = await spawned()
        assert (await other.seen(x))[1].sum() == 40


async def test_moved_to_a_process_without_a_gpu() -> None:
    async with running():
        actor = await spawned({"CUDA_VISIBLE_DEVICES": ""})
        assert (await actor.filled(zc.move(zc.zeros(100, "i4", device="cuda")), 5) == 5).all()
        assert (await actor.stats()).copies["moved array on a GPU"].nbytes == 400


async def test_moved_where_memory_cannot_leave_the_process() -> None:
    async with running("export=none"):
        actor = await spawned()
        assert (await actor.filled(zc.move(zc.zeros(100, "i4", device="cuda")), 5) == 5).all()
        assert "moved array on a GPU" not in (await actor.stats()).copies


# ---- order


async def late(waits: str) -> bool:
    """Whether a reader sees what was still to be computed when the array was passed."""
    async with running(f"waits={waits}"):
        actor = await spawned()
        x = zc.zeros(1000, "u1", device="cuda")
        zc.gpu.to_host(x)
        with zc.gpu.stream() as stream, held(driver(), stream.ptr):
            for value in (1, 2, 9):
                x.fill(value)
            copied = await actor.doubled(x)
            await actor.settle()  # without waits it has copied by now
        return bool((zc.gpu.to_host(copied) == 9).all())


async def test_receivers_see_work_that_was_queued_before() -> None:
    assert await late("yes")


async def test_without_waits_they_do_not() -> None:
    assert not await late("no")


async def test_nobody_waits_for_the_work() -> None:
    async with running(""):
        actor = await spawned()
        with held(driver()):
            x = zc.zeros(1000, "u1", device="cuda")
            await actor.keep(x)
            assert (await actor.facts(x))[0] == (1000,)
            assert zc.stats().device_syncs == 0


async def test_where_events_are_not_shared_the_producer_waits() -> None:
    async with running("events=none"):
        actor = await spawned()
        devices = current().store.devices()
        devices.driver.hold(0, 0, lambda: devices.syncs)
        x = zc.full(1000, 4, "u1", device="cuda")
        assert (await actor.seen(x))[1].sum() == 4000
        assert (await actor.seen(x))[1].sum() == 4000
        assert zc.stats().device_syncs == 1


async def test_bytes_are_leased_until_the_readers_work_is_done() -> None:
    async with running("memory=64MiB", device_keep_nbytes=0):
        actor = await spawned()
        x = zc.full(1 << 20, 8, "u1", device="cuda")
        await actor.hold()
        copied = await actor.doubled(x)  # dropped there before its copy has begun
        del x
        y = zc.full(1 << 20, 1, "u1", device="cuda")
        assert (zc.gpu.to_host(y) == 1).all()
        assert zc.stats().device_leases == 1
        await actor.let_go()
        assert (zc.gpu.to_host(copied) == 8).all()
        del copied, y
        await until(lambda: zc.stats().device_leases == zc.stats().device_used == 0, "everything is given back")


async def test_a_thousand_passes_leave_nothing() -> None:
    async with running("late=0"):
        actor = await spawned()
        before: tuple[set[tuple[str, str]], set[threading.Thread]] = set(), set()
        for number in range(1000):
            if number == 100:
                before = opened(), set(threading.enumerate())
            x = zc.full(1 << 16, number % 250, "u1", device="cuda")
            await actor.keep(x)
            if number % 100 == 0:
                assert (zc.gpu.to_host(await actor.kept()) == number % 250).all()
        await actor.keep(None)
        del x
        await until(lambda: zc.stats().device_leases == zc.stats().device_used == 0, "everything is given back")
        assert (await actor.stats()).device_extents == 1
        assert opened() <= before[0] and set(threading.enumerate()) <= before[1]


@pytest.mark.parametrize(
    ("options", "env"),
    [("", {}), ("export=none", {}), ("peer=none", {}), ("", {"CUDA_VISIBLE_DEVICES": ""})],
    ids=["mapped", "not exported", "copied", "no GPU"],
)
async def test_empty_views_at_an_end_of_their_memory(options: str, env: dict[str, str]) -> None:
    async with running(options):
        actor, other = await spawned(env), await spawned(env)
        for x in (zc.zeros((0, 3), device="cuda")[:, 1], zc.zeros((4, 3), device="cuda")[4:, 1]):
            kind, seen = await actor.seen(x)
            assert seen.shape == (0,)
            await actor.keep(x)
            back = await actor.kept()
            assert type(back).__name__ == kind and back.shape == (0,)
            for each in (x, back, [x, back], actor.kept()):
                await other.keep(each)
            assert (await actor.relay(other, x))[1].shape == (0,)


# ---- through host memory


@pytest.mark.parametrize("options", ["export=none", "devices=2,export=none"])
async def test_memory_that_cannot_leave_the_process(options: str) -> None:
    async with running(f"{options},late=10"):
        actor = await spawned()
        x = zc.gpu.to_device(np.arange(10_000, dtype="i8"))
        kind, seen = await actor.seen(x[::2])
        assert kind == "DeviceArray"
        assert_same(seen, np.arange(10_000)[::2])
        assert zc.stats().copies["through host memory"].count == 1
        assert (await actor.stats()).copies["through host memory"].count == 1
        assert "read-only" in await actor.writes(x)


async def test_a_process_without_a_gpu_gets_a_numpy_array() -> None:
    async with running("late=10"):
        actor = await spawned({"CUDA_VISIBLE_DEVICES": ""})
        values = np.arange(10_000, dtype="i4").reshape(100, 100)
        kind, seen = await actor.seen(zc.gpu.to_device(values).T)
        assert kind == "ndarray"
        assert_same(seen, values.T)
        assert zc.stats().copies["through host memory"].count == 1
        assert "through host memory" not in (await actor.stats()).copies
        assert "read-only" in await actor.writes(zc.zeros(5, device="cuda"))


async def test_a_gpu_that_the_receiver_does_not_see() -> None:
    async with running("devices=2,peer=none"):
        actor = await spawned({"CUDA_VISIBLE_DEVICES": "1"})
        there = zc.full(1000, 3, "u1", device="cuda:1")
        hidden = zc.full(1000, 4, "u1", device="cuda:0")
        assert (await actor.facts(there))[3:5] == ("cuda:0", there.uuid)
        assert (await actor.facts(hidden))[3:5] == ("cuda:0", there.uuid)
        assert (await actor.seen(hidden))[1].sum() == 4000
        assert zc.stats().copies["through host memory"].count == 2


async def test_a_large_copy_of_memory_that_is_not_pinned_does_not_hold_up_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA returns from such a copy when it is done."""
    async with running("memory=1GiB"):
        actor = await spawned({"CUDA_VISIBLE_DEVICES": ""})
        x = zc.full(64 << 20, 3, "u1", device="cuda")
        copy, loop, threads = driver().copy, threading.get_ident(), set[int]()

        def noted(*each: Any) -> None:
            threads.add(threading.get_ident())
            copy(*each)

        monkeypatch.setattr(driver(), "copy", noted)
        assert (await actor.total(x))[1] == 3 * x.nbytes
        assert threads and loop not in threads


# ---- failures


@pytest.mark.parametrize(
    "call", ["import_", "reserve", "map", "export", "open_event", "export_event", "add_event_page"]
)
async def test_a_call_that_fails_once_is_an_error_or_another_path(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(f"fail={call}" + (":2" if call in {"reserve", "map"} else "")):
        actor = await spawned()
        failed = []
        for _ in range(4):
            try:
                with held(driver()):  # so that an event goes along
                    x = zc.full(1000, 7, "u1", device="cuda")
                    ref = actor.seen(x)
                assert (await ref)[1].sum() == 7000
            except zc.DeviceError as error:
                failed.append(error.call)
            del x
        assert failed == ([call] if call in {"open_event", "export_event"} else [])  # arrays come without extents, too
        await until(lambda: zc.stats().device_leases == zc.stats().device_used == 0, "everything is given back")


FATAL = (
    "create!", "reserve!", "map!", "release!", "import_!", "export!", "event!", "event_page!", "open_event!",
    "add_event_page!", "export_event!", "record!", "record!:3", "copy!", "copy!:3", "fill!", "done!",
    "done!:3", "idle!", "end_event!",
)  # fmt: skip


@pytest.mark.parametrize("call", FATAL)
async def test_a_call_that_breaks_the_context_is_an_error_and_nothing_waits(call: str) -> None:
    async with asyncio.timeout(60), running(f"fail={call}"):
        actor, texts = await spawned(), list[str]()
        for value in range(3):
            try:
                with held(driver()):
                    x = zc.full(1000, value, "u1", device="cuda")
                    ref = actor.seen(x)
                assert ((await ref)[1] == value).all()
                y = await actor.full(1000, value)
                assert (zc.gpu.to_host(y) == value).all()
            except (zc.DeviceError, zc.ObjectLost, zc.ActorDied) as error:
                texts.append(str(error))
        reasons = call.partition("!")[0], "broke the context", "lost its GPU"
        assert texts and all(any(reason in text for reason in reasons) for text in texts), texts


async def used_in_many_ways(actor: Any, value: int) -> None:
    """Pass arrays, have results, and use copies, streams and libraries' ways of arrays on GPUs."""
    x = zc.full(1000, value, "u1", device="cuda")
    with zc.gpu.stream() as stream:
        y = x.copy()
        y.__dlpack__(stream=2)
        stream.synchronize()
    assert ((await actor.seen(x))[1] == value).all() and (zc.gpu.to_host(y) == value).all()
    z = await actor.full(5 << 20, value)
    assert (zc.gpu.to_host(z) == value).all()
    w = zc.empty(z.shape, "u1", device="cuda:1")
    w.copy_from(z)
    assert (zc.gpu.to_host(zc.gpu.to_device(zc.gpu.to_host(w), "cuda")) == value).all()
    assert zc.gpu.gpus()
    assert await actor.total(zc.put(y)) == ("DeviceArray", 1000 * value)


BREAKING = sorted(f"{call}!" for call in CALLS)


@pytest.mark.parametrize("export", ["vmm", "none"])
@pytest.mark.parametrize("call", BREAKING)
async def test_whichever_call_breaks_the_context_values_are_right_or_errors(call: str, export: str) -> None:
    async with asyncio.timeout(60), running(f"devices=2,fail={call},export={export}"):
        actor = await spawned()
        for value in (3, 5, 7):
            with contextlib.suppress(zc.DeviceError, zc.ObjectLost, zc.ActorDied):
                await used_in_many_ways(actor, value)


async def test_an_import_that_was_refused_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_direct, "FIRST_PAUSE", 0.0)
    async with running("fail=import_"):
        actor: Any = await spawned()
        reach: Any = current().resolver.devices  # type: ignore[attr-defined]
        for extents in (0, 1):
            x = await actor.full(1000, extents)
            assert (zc.gpu.to_host(x) == extents).all() and zc.stats().device_extents == extents
            assert bool(reach.rejected) == (not extents)
            del x


@pytest.mark.parametrize("left", [0, 1, 2])
async def test_descriptors_at_their_limit(left: int) -> None:
    async with running(), asyncio.timeout(60):
        actor = await spawned()
        assert (
            (await actor.seen(zc.full(1000, 2, "u1", device="cuda")))[1] == 2
        ).all()  # it has imported what it needs
        await actor.leave_descriptors(left)
        x = zc.full(1000, 3, "u1", device="cuda:1")
        with contextlib.suppress(zc.OutOfMemory, zc.ObjectLost):  # no memory of the fake, or no module, can be opened
            assert ((await actor.seen(x))[1] == 3).all()
        with contextlib.suppress(zc.OutOfMemory, zc.ObjectLost):
            assert (zc.gpu.to_host(await actor.full(1000, 4)) == 4).all()
        await actor.restore_descriptors()
        assert ((await actor.seen(x))[1] == 3).all()
        assert (zc.gpu.to_host(await actor.full(1000, 4)) == 4).all()


async def test_the_owner_dies() -> None:
    async with running("late=0"):
        actor = await spawned()
        ready = await actor.full(1000, 6)
        assert (zc.gpu.to_host(ready) == 6).all()
        await zc.kill(actor)
        assert (zc.gpu.to_host(ready) == 6).all()
        other = await spawned()
        before = zc.stats().bytes_copied
        for _ in range(2):
            assert (await other.seen(ready[1:]))[1].sum() == 5994
        assert zc.stats().copies["owner ended"].count == 1 and zc.stats().bytes_copied == before + 1000
        assert (await other.seen(ready.copy()))[1].sum() == 6000


async def test_the_owner_dies_before_its_work_is_done() -> None:
    async with running(""):
        actor = await spawned()
        await actor.hold()
        x = await actor.full(1000, 6)
        await zc.kill(actor)
        with pytest.raises(zc.ObjectLost, match="compute the value again"):
            zc.gpu.to_host(x)
        with pytest.raises(zc.ObjectLost, match="compute the value again"):
            x.copy()


async def test_what_is_computed_from_an_array_that_its_owner_never_computes() -> None:
    async with running(""):
        maker, middle, reader = await spawned(), await spawned(), await spawned()
        await maker.hold()
        x = await maker.full(1000, 6)
        own, piece, apart = x.copy(), zc.full(2000, 1, "u1", device="cuda"), zc.full(1000, 2, "u1", device="cuda")
        piece[:1000].copy_from(x)
        rewritten = x.copy()
        rewritten.fill(4)
        theirs = await middle.doubled(x)
        further = await reader.doubled(theirs)
        of_ours = await middle.doubled(own)
        reading = [asyncio.create_task(reader.seen(each)) for each in (x, own, theirs, further, of_ours)]
        await zc.kill(maker)
        for each in (x, own, piece, theirs, further, of_ours):
            with pytest.raises(zc.ObjectLost, match="compute the value again"):
                zc.gpu.to_host(each)
            with pytest.raises(zc.ObjectLost, match="compute the value again"):
                zc.gpu.to_host(each.copy())
            with pytest.raises((zc.ObjectLost, zc.RemoteError), match="compute the value again"):
                await reader.seen(each)
        for outcome in await asyncio.gather(*reading, return_exceptions=True):
            assert "ObjectLost" in repr(outcome)
        assert (zc.gpu.to_host(rewritten) == 4).all() and (await reader.seen(apart))[1].sum() == 2000
        piece[1:].fill(5)
        with pytest.raises(zc.ObjectLost):
            zc.gpu.to_host(piece)
        piece.fill(7)
        assert (zc.gpu.to_host(piece) == 7).all()
        del x, own, piece, apart, rewritten, theirs, further, of_ours, each, reading, outcome
        await until(lambda: zc.stats().device_leases == zc.stats().device_used == 0, "everything is given back")
        for actor in (middle, reader):
            assert (await actor.stats()).device_used == 0


async def test_what_is_computed_from_an_array_that_comes_later_is_waited_for_by_nobody() -> None:
    async with running(""):
        maker, middle, reader = await spawned(), await spawned(), await spawned()
        await maker.hold()
        x = await maker.full(1000, 6)
        theirs = await middle.doubled(x)
        further = await reader.doubled(theirs)
        again = await middle.doubled(further.copy())
        reading = [asyncio.create_task(reader.seen(each)) for each in (x, theirs, further, again)]
        await maker.let_go()
        assert [(await each)[1].sum() for each in reading] == [6000] * 4
        assert zc.gpu.to_host(again).sum() == 6000
        assert zc.stats().device_syncs == 0
        for actor in (maker, middle, reader):
            assert (await actor.stats()).device_syncs == 0


@pytest.mark.parametrize("held", [True, False])
async def test_what_a_library_computes_from_an_array_that_its_owner_never_computes(held: bool) -> None:
    async with running(""):
        maker, reader = await spawned(), await spawned()
        await maker.hold()
        x, own = await maker.full(1000, 6), zc.full(1000, 3, "u1", device="cuda")
        made = zc.full(1000, 1, "u1", device="cuda")
        for _ in range(20):
            into, out = made.__cuda_array_interface__, x.__cuda_array_interface__
            driver().copy(0, into["data"][0], out["data"][0], 1, 1000, (1000, 1000), 0)  # as a library would
        assert len(made.holder.work.writes()) < 5
        passed = asyncio.create_task(reader.seen(made))
        if not held:
            del x
        await zc.kill(maker)
        for _ in range(2):
            with pytest.raises(zc.ObjectLost, match="compute the value again"):
                zc.gpu.to_host(made)
            with pytest.raises((zc.ObjectLost, zc.RemoteError), match="compute the value again"):
                await reader.seen(made)
        with pytest.raises((zc.ObjectLost, zc.RemoteError), match="compute the value again"):
            await passed
        assert (zc.gpu.to_host(own) == 3).all(), "no library had it"


async def test_an_array_is_written_anew_by_one_write() -> None:
    async with running(""):
        maker = await spawned()
        await maker.hold()
        x = await maker.full(1000, 6)
        made = [x.copy() for _ in range(5)]
        await zc.kill(maker)
        made[0].fill(7)
        made[1][::-1].copy_from(np.arange(1000).astype("u1"))
        made[2].reshape(500, 2).T.fill(9)
        made[3][None].fill(5)
        made[4][1:].fill(5)
        assert (zc.gpu.to_host(made[0]) == 7).all() and (zc.gpu.to_host(made[2]) == 9).all()
        assert (zc.gpu.to_host(made[1]) == np.arange(1000).astype("u1")[::-1]).all()
        assert (zc.gpu.to_host(made[3]) == 5).all()
        with pytest.raises(zc.ObjectLost):
            zc.gpu.to_host(made[4])


async def test_work_of_another_process_that_is_done_just_when_it_is_passed_on() -> None:
    async with running(""):
        devices: Any = current().store.devices()
        block: Any = zc.ones(10, device="cuda").holder
        gpu = block.gpu
        event = OpenEvent(gpu, gpu.driver.promise_event(0))
        gpu.driver.keep_promise(0, event.event, True)
        told = _last(devices, block, [event.moment()])
        assert gpu.driver.export_event(0, told.event)
        await until(told.done, "it is told")


async def test_a_reader_dies() -> None:
    async with running():
        actor = await spawned()
        x = zc.full(1000, 6, "u1", device="cuda")
        await actor.keep(x)
        assert zc.stats().device_leases == 1
        await zc.kill(actor)
        del x
        await until(lambda: zc.stats().leases == zc.stats().device_used == 0, "its lease ends")


async def test_arrays_of_an_earlier_runtime_are_copied() -> None:
    async with running():
        x = zc.full(1000, 6, "u1", device="cuda")
    async with running():
        actor = await spawned()
        assert not zc.in_store(x)
        assert (await actor.seen(x))[1].sum() == 6000
        assert zc.stats().copies["argument outside the device store"].count == 1
    async with zc.init(config=zc.Config(gpu="off")):
        actor = await spawned()
        with pytest.raises(zc.DeviceUnavailable):
            await actor.seen(x)


async def test_calls_at_once_import_an_extent_once() -> None:
    async with running():
        actor = await spawned()
        x = zc.full(1000, 6, "u1", device="cuda")
        found = await asyncio.gather(*(actor.seen(x[number:]) for number in range(20)))
        assert [each[1].size for each in found] == list(range(1000, 980, -1))
        assert (await actor.stats()).device_extents == 1


# ---- malformed messages


MALFORMED: list[Any] = [
        [], [0], "text",
        [1, "|u1", [10], [1], 0, None, "", False],  # no such part
        [0, "|u1", [11], [1], 0, None, "", False],
        [0, "|u1", [10], [2], 0, None, "", False],
        [0, "|u1", [10], [-1], 0, None, "", False],
        [0, "|u1", [10], [1], 1, None, "", False],
        [0, "|u1", [10], [1], -1, None, "", False],
        [0, "|u1", [1 << 62, 4], [1 << 62, 4], 0, None, "", False],
        [0, "|u1", [-1], [1], 0, None, "", False],
        [0, "|u1", [10], [], 0, None, "", False],
        [0, "|u1", [10.0], [1], 0, None, "", False],
        [0, "|u1", 10, [1], 0, None, "", False],
        [0, "|u1", [1] * 65, [1] * 65, 0, None, "", False],
        [0, "|O", [1], [8], 0, None, "", False],
        [0, "|u1", [10], [1], 0, b"short", "", False],
        [0, "|u1", [10], [1], 0, 5, "", False],
        [0, "|u1", [10], [1], None, None, "", False],
        [0, "|u1", [10], [1], 0, None, ""],
        [0, "|u1", [10], [1], 0, None, 5, False],
        [0, "|u1", [10], [1], 0, None, "", 1],
        [0, "|u1", [10], [1], 0, None, "os", False],
        [0, "|u1", [10], [1], 0, None, "torch:load", False],
    ]  # fmt: skip
"""Layouts of a part of 10 bytes."""


async def test_malformed_layouts() -> None:
    async with running():
        x = zc.full(10, 1, "u1", device="cuda")
        holder: Any = x.holder
        unpacking = Unpacking(current().store, CopyCounter(), hot.Counters())
        unpacking.parts = [Part(RegionKind.DEVICE, holder, holder.offset, 10)]
        for fields in MALFORMED:
            with pytest.raises(ProtocolError):
                unpack_device_array(unpacking, memoryview(encode(fields)))


async def test_parts_that_are_no_arrays_on_a_gpu() -> None:
    async with running():
        x = zc.full(10, 1, "u1", device="cuda")
        holder: Any = x.holder
        unpacking = Unpacking(current().store, CopyCounter(), hot.Counters())
        data = memoryview(encode([0, "|u1", [10], [1], 0, None, "", False]))
        for part in (Part(RegionKind.ARRAY, holder, holder.offset, 10), Part(RegionKind.DEVICE, object(), 0, 10)):
            unpacking.parts = [part]
            with pytest.raises(ProtocolError):
                unpack_device_array(unpacking, data)
        unpacking.parts = [Part(RegionKind.DEVICE, LostPart("it is lost"), 0, 0)]
        with pytest.raises(zc.ObjectLost, match="it is lost"):
            unpack_device_array(unpacking, data)
