"""The common part of all implementations of the verbs, over a driver that only records closes."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.transport.verbs.driver.adapter import (
    DriverCompletionQueue,
    DriverDevice,
    DriverRegion,
    OpenQueuePair,
    OwnedObject,
    device_attributes,
    port_attributes,
)
from zcactor.transport.verbs.driver.base import VerbsError
from zcactor.transport.verbs.driver.device_resources import ResourceKind

ATTRIBUTES = SimpleNamespace(phys_port_cnt=1, max_qp_rd_atom=2, max_qp_wr=3, max_srq_wr=4, max_cqe=5)


class Handle:
    """An object of the driver's, which may refuse to be closed."""

    lkey, rkey = 7, 8

    def __init__(self, log: list[Handle], *, refuses: bool = False) -> None:
        self.log, self.refuses = log, refuses

    def close(self) -> None:
        """Log the close, or refuse it."""
        self.log.append(self)
        if self.refuses:
            raise OSError(errno.EBUSY, "no")


class Queue(OwnedObject):
    """A shared receive queue."""

    kind = ResourceKind.SHARED_RECEIVE_QUEUE

    def _release(self) -> None: ...


class Pair(OpenQueuePair):
    """A queue pair that its test connects."""

    qp_num = 17

    def _release(self) -> None: ...


class Device(DriverDevice):
    """A device that logs every closed object in `log`."""

    def __init__(self, name: str = "dev", *, refuses: bool = False) -> None:
        super().__init__(name)
        self.attributes = device_attributes(ATTRIBUTES, 6)
        self.log: list[Handle] = []
        self._pd = Handle(self.log, refuses=refuses)
        self._context = Handle(self.log)

    def _take_event(self) -> int:
        assert self.async_fd is not None
        return os.read(self.async_fd, 1)[0]


def test_attributes_of_a_device() -> None:
    found = device_attributes(ATTRIBUTES, 6)
    assert (found.ports, found.max_qp_rd_atom, found.max_qp_init_rd_atom) == (1, 2, 6)
    assert (found.max_qp_wr, found.max_srq_wr, found.max_cqe) == (3, 4, 5)


def test_attributes_of_a_port() -> None:
    found = port_attributes(1, SimpleNamespace(state=4, active_mtu=5, max_msg_sz=1 << 20, lid=3, link_layer=2))
    assert (found.port, found.state, found.active_mtu) == (1, 4, 5)
    assert (found.max_msg_sz, found.lid, found.link_layer) == (1 << 20, 3, 2)


@pytest.mark.parametrize(
    ("check", "limit", "message"),
    [
        ("_check_completion_queue", 5, "the completion queue's depth is 6; the device takes 1 to 5 .max_cqe"),
        ("_check_shared_receive_queue", 4, "the shared receive queue's depth is 5; .* 1 to 4 .max_srq_wr"),
        ("_check_queue_pair", 3, "max_send_wr is 4; .* 1 to 3 .max_qp_wr"),
    ],
)
def test_limits_of_a_device(check: str, limit: int, message: str) -> None:
    device = Device()
    getattr(device, check)(limit)
    with pytest.raises(VerbsError, match=message):
        getattr(device, check)(limit + 1)
    device.close()
    with pytest.raises(VerbsError, match="the device is closed"):
        getattr(device, check)(limit)


def test_regions_are_checked() -> None:
    device = Device()
    device._check_region(1, 1)
    with pytest.raises(VerbsError, match="0 bytes"):
        device._check_region(1, 0)
    device.close()
    with pytest.raises(VerbsError, match="the device is closed"):
        device._check_region(1, 1)


def test_only_open_children_of_the_device_are_its_own() -> None:
    device, other = Device(), Device()
    queue = Queue(device.ledger)
    assert device._own(Queue, queue) is queue
    for stranger in (Queue(other.ledger), Pair(device.ledger), None):
        with pytest.raises(VerbsError, match="the shared receive queue is closed, or of another device"):
            device._own(Queue, stranger)
    queue.close()
    with pytest.raises(VerbsError, match="closed, or of another device"):
        device._own(Queue, queue)


def test_a_queue_pair_posts_when_it_is_open_and_connected() -> None:
    pair = Pair(Device().ledger)
    with pytest.raises(VerbsError, match="queue pair 17 is not connected"):
        pair._limit()
    pair._max_message = 1000
    assert pair._limit() == 1000
    pair.close()
    with pytest.raises(VerbsError, match="the queue pair is closed"):
        pair._limit()


def test_children_are_closed_once_and_before_the_device() -> None:
    device = Device()
    memory, cq, channel = (Handle(device.log) for _ in range(3))
    region = DriverRegion(device, memory, 4096, 10)
    assert (region.address, region.nbytes, region.lkey, region.rkey) == (4096, 10, 7, 8)
    queue = DriverCompletionQueue(device, 5, cq, channel)
    pair = Pair(device.ledger, queue)
    with pytest.raises(OSError, match="1 open queue pairs use the completion queue"):
        queue.close()
    pair.close()
    region.close()
    region.close()
    assert device.log == [memory]
    assert repr(device) == "<Device dev, open>"
    device.close()
    device.close()
    assert device.log == [memory, cq, channel, device._pd, device._context]
    assert repr(device) == "<Device dev, closed>"
    with pytest.raises(VerbsError, match="the device is closed"):
        device.gids(1)


def test_refusals_do_not_stop_the_rest() -> None:
    device = Device(refuses=True)
    cq, channel = Handle(device.log, refuses=True), Handle(device.log)
    DriverCompletionQueue(device, 5, cq, channel)
    with pytest.raises(OSError, match="no") as caught:
        device.close()
    assert caught.value.errno == errno.EBUSY
    assert device.log == [cq, channel, device._pd, device._context]


def test_events_are_taken_until_none_waits() -> None:
    device = Device()
    assert device.async_events() == []
    read, write = os.pipe()
    try:
        device._watch_events(read)
        assert device.async_fd == read and not os.get_blocking(read)
        assert device.async_events() == []
        os.write(write, bytes([10, 9, 99]))
        assert device.async_events() == [10, 9, 99]
        assert device.async_events() == []
        device.close()
        with pytest.raises(VerbsError, match="the device is closed"):
            device.async_events()
    finally:
        os.close(read)
        os.close(write)


def test_an_event_that_another_reader_has_taken() -> None:
    class Late(Device):
        def _take_event(self) -> int:
            raise BlockingIOError(errno.EAGAIN, "nothing")

    device = Late()
    read, write = os.pipe()
    try:
        device._watch_events(read)
        os.write(write, b"x")
        assert device.async_events() == []
    finally:
        os.close(read)
        os.close(write)


def test_events_of_a_device_that_is_gone() -> None:
    class Gone(Device):
        def _take_event(self) -> int:
            raise OSError(errno.EIO, "gone")

    device = Gone()
    read, write = os.pipe()
    try:
        device._watch_events(read)
        os.close(write)
        with pytest.raises(OSError, match="gone"):
            device.async_events()
    finally:
        os.close(read)


def test_a_bindings_own_errors_become_os_errors() -> None:
    class Translating(Device):
        def closing(self, what: str) -> Any:
            return Translation(what)

    class Translation:
        def __init__(self, what: str) -> None:
            self.what = what

        def __enter__(self) -> None: ...

        def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
            if error is not None:
                raise OSError(errno.EIO, self.what) from error

    device = Translating()
    region = DriverRegion(device, Handle(device.log, refuses=True), 4096, 10)
    with pytest.raises(OSError, match="ibv_dereg_mr"):
        region.close()
    device._context.refuses = True
    with pytest.raises(OSError, match="ibv_close_device"):
        device.close()
