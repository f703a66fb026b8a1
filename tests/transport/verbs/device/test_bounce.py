"""Memory that pulls borrow: in turns, and given back when no device can write to it."""

from __future__ import annotations

import asyncio

from tests.conformance.connection import turns
from tests.transport.verbs.parts import open_device
from zcactor.transport.verbs.device.bounce import BOUNCE_NBYTES, Bounce
from zcactor.transport.verbs.driver.fake import FakeFabric


async def test_pieces_are_borrowed_in_turns() -> None:
    device = open_device(FakeFabric(), "a")
    bounce = Bounce(device, asyncio.get_running_loop())
    (region,) = device.regions.values()
    assert (region.nbytes, region.remote_read) == (BOUNCE_NBYTES, False), "no peer reads what comes to others"
    first, second = await bounce.borrow(), await bounce.borrow()
    assert first.address != second.address
    for loan in (first, second):
        assert loan.lkey == region.lkey and region.holds(loan.address, loan.nbytes)
    waiting, cancelled = (asyncio.create_task(bounce.borrow()) for _ in range(2))
    await turns()
    assert not waiting.done()
    cancelled.cancel()
    address = first.address
    del first, loan
    third = await waiting
    assert third.address == address, "that which was given back"
    del second
    await turns()
    fourth = await bounce.borrow()
    assert fourth.address != third.address


def test_a_piece_may_come_back_when_the_loop_is_closed() -> None:
    device = open_device(FakeFabric(), "a")
    loop = asyncio.new_event_loop()
    bounce = Bounce(device, loop)
    loan = loop.run_until_complete(bounce.borrow())
    loop.close()
    del loan
    assert not bounce._free.empty(), "the other one"
