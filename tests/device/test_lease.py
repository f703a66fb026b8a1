"""Leases on GPU memory of other processes: they go back once, after the work that was queued on the bytes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from tests.conformance.device_peer import write
from tests.device.helpers import fetched, held, opened, seen
from zcactor.device.array import array_over
from zcactor.device.lease import DeviceLease, HostCopy
from zcactor.device.memory import DeviceBlock

OWNER = b"o" * 16


def test_a_lease_without_a_place_goes_back_at_once() -> None:
    released: list[tuple[int, int]] = []
    lease = DeviceLease(OWNER, 5, 0, 10, lambda *each: released.append(each))
    assert lease.readonly and not released
    del lease
    assert released == [(5, 10)]


def test_a_lease_goes_back_after_the_work() -> None:
    with opened() as ours, opened() as theirs:
        block = DeviceBlock(theirs.gpu(0), 100)
        write(theirs.driver, 0, block.address, bytes(range(100)))
        ours.imports.add(OWNER, fetched(theirs, block.offset))
        extent = ours.imports.find(OWNER, block.offset, 100)
        assert extent is not None
        released: list[tuple[int, int]] = []
        lease = DeviceLease(OWNER, block.id, block.offset, 100, lambda *each: released.append(each))
        lease.place(extent)
        loop = ours.tending._loop
        with held(ours.driver):
            copied = array_over(lease, lease.address, (100,), np.dtype("u1"), (1,)).copy()
            moments = lease.work.all()
            del lease
            loop.call_soon(loop.stop)
            loop.run_forever()
            assert not released and not moments[0].done()
        while not released:
            loop.call_later(0.001, loop.stop)
            loop.run_forever()
        assert moments[0].done() and released == [(block.id, 100)]
        assert (seen(copied) == np.arange(100)).all()


def test_a_lease_is_granted_on() -> None:
    lease = DeviceLease(OWNER, 5, 0, 10, lambda *_: None)
    copied = HostCopy(np.zeros(10, "u1"), lease)
    third = SimpleNamespace(peer_process=b"t" * 16, pin=lambda holder: 99 if holder is lease else 0)
    for holder in (lease, copied):
        assert holder.grant(SimpleNamespace(peer_process=OWNER)) == (OWNER, 5, 0)
        assert holder.grant(third) == (OWNER, 5, 99)
