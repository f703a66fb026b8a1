"""Other libraries' arrays over blocks, leases and memory of their own."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import numpy as np

from tests.device.foreigners import Interfaced, Packed, outside
from tests.device.helpers import array_on, fetched, held, opened, seen
from zcactor.device.foreign import Outside, known_array
from zcactor.device.lease import DeviceLease
from zcactor.device.store import DeviceStore
from zcactor.device.streams import GpuStream


def test_in_a_block() -> None:
    with opened("devices=2") as store:
        other = array_on(store.gpu(0), np.arange(9))
        array = array_on(store.gpu(1), np.arange(12, dtype="i4").reshape(3, 4))
        for part in (array, array[1:], array[::-1, ::-1], array[2, 3]):
            known = known_array(store, Packed(part))
            assert known is not None and known.library == ""
            assert known.array.holder is array.holder
            assert (seen(known.array) == seen(part)).all()
        known = known_array(store, Packed(array[:0]))
        assert known is not None and known.array.shape == (0, 4)
        assert (seen(other) == np.arange(9)).all()


def test_beyond_a_block() -> None:
    with opened() as store:
        array = array_on(store.gpu(0), np.arange(64))
        beyond = known_array(store, Interfaced(array.address, (1000,), "<i8"))
        assert beyond is not None and type(beyond.array.holder) is Outside


def lease_in(store: DeviceStore, owner: DeviceStore, address: int, nbytes: int) -> DeviceLease:
    """A lease on bytes of another store, imported by this one."""
    gpu = owner.gpu(0)
    offset = gpu.base + gpu.arena.around(address)
    store.imports.add(b"o" * 16, fetched(owner, offset))
    lease = DeviceLease(b"o" * 16, 7, offset, nbytes, print)
    imported = store.imports.find(b"o" * 16, offset, nbytes)
    assert imported is not None
    lease.place(imported)
    return lease


def test_in_a_lease() -> None:
    with opened() as owner, opened() as store:
        array = array_on(owner.gpu(0), np.arange(100, dtype="u1"))
        lease = lease_in(store, owner, array.address, 100)
        known = known_array(store, Interfaced(lease.address + 10, (50,), "|u1", strides=(1,)))
        assert known is not None and known.array.holder is lease and known.array.readonly
        assert (seen(known.array) == np.arange(10, 60)).all()
        beyond = known_array(store, Interfaced(lease.address + 60, (50,), "|u1"))
        assert beyond is not None and type(beyond.array.holder) is Outside
        held, kept = ref(lease), known.array
        del lease, known
        gc.collect()
        assert held() is kept.holder


def test_outside() -> None:
    with opened() as store:
        gpu = store.gpu(0)
        address = outside(gpu)
        gpu.driver.fill(0, address, b"\1\0\0\0", 12, 0)
        found = Interfaced(address, (3, 4), "<i4", strides=(4, 12), stream=1)
        known = known_array(store, found)
        assert known is not None
        holder: Any = known.array.holder
        assert type(holder) is Outside and not known.array.readonly
        copied = holder.copied(known.array)
        assert copied.strides == (16, 4) and (seen(copied) == 1).all()
        assert not store.holds(known.array) and store.holds(copied)


def test_memory_of_nothing() -> None:
    with opened() as store:
        assert known_array(store, Interfaced(4096, (3,), "<i4")) is None
        assert known_array(store, np.arange(3)) is None
        assert known_array(store, "text") is None
    with opened("devices=1") as store:
        store.gpus.clear()
        assert known_array(store, Interfaced(4096, (3,), "<i4")) is None


def test_bytes_of_a_library_are_kept_until_our_work_is_done() -> None:
    with opened() as store, held(store.driver):
        gpu = store.gpu(0)
        found = Interfaced(outside(gpu), (100,), "|u1")
        kept = ref(found)
        known = known_array(store, found)
        assert known is not None
        copied = known.array.copy()
        del known, found
        gc.collect()
        assert kept() is not None
        del copied


def test_a_copy_is_queued_on_the_librarys_stream() -> None:
    with opened() as store:
        gpu = store.gpu(0)
        stream, address = GpuStream(gpu), outside(gpu)
        with held(store.driver, stream.ptr):
            gpu.driver.fill(0, address, b"a", 100, stream.ptr)
            known = known_array(store, Interfaced(address, (100,), "|u1", stream=stream.ptr))
            assert known is not None
            holder: Any = known.array.holder
            copied = holder.copied(known.array)
            assert [each.lane for each in copied.holder.work.writes()] == [stream.lane]
        assert (seen(copied) == ord("a")).all()
