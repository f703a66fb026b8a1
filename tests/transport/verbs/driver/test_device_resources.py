"""Closing in order, once."""

from __future__ import annotations

import errno
import sys
import threading

import pytest

from zcactor.transport.verbs.driver.device_resources import DeviceResources, ResourceKind


class Child:
    """An object that closes itself as all children of a device do."""

    def __init__(
        self, ledger: DeviceResources, kind: ResourceKind, log: list[Child], *uses: Child, refuses: bool = False
    ) -> None:
        self.ledger, self.kind, self.log, self.refuses = ledger, kind, log, refuses
        ledger.add(kind, self, *uses)

    def close(self) -> None:
        """Log the close, or refuse it."""
        if self.ledger.remove(self.kind, self):
            if self.refuses:
                raise OSError(errno.EIO, "no")
            self.log.append(self)


def test_users_keep_what_they_use_open() -> None:
    ledger, log = DeviceResources("dev"), []  # type: ignore[var-annotated]
    cq = Child(ledger, ResourceKind.COMPLETION_QUEUE, log)
    qp = Child(ledger, ResourceKind.QUEUE_PAIR, log, cq)
    assert cq in ledger
    with pytest.raises(OSError, match="dev: 1 open queue pairs use the completion queue") as caught:
        cq.close()
    assert caught.value.errno == errno.EBUSY
    qp.close()
    qp.close()
    cq.close()
    assert log == [qp, cq]
    assert len(ledger) == 0


def test_order_of_closing() -> None:
    ledger, log = DeviceResources("dev"), []  # type: ignore[var-annotated]
    cq = Child(ledger, ResourceKind.COMPLETION_QUEUE, log)
    region = Child(ledger, ResourceKind.MEMORY_REGION, log)
    srq = Child(ledger, ResourceKind.SHARED_RECEIVE_QUEUE, log)
    first = Child(ledger, ResourceKind.QUEUE_PAIR, log, cq, srq)
    second = Child(ledger, ResourceKind.QUEUE_PAIR, log, cq, srq)
    assert ledger.close() == []
    assert log == [second, first, srq, region, cq]
    assert ledger.close() == []


def test_refusals_do_not_stop_the_rest() -> None:
    ledger, log = DeviceResources("dev"), []  # type: ignore[var-annotated]
    cq = Child(ledger, ResourceKind.COMPLETION_QUEUE, log)
    Child(ledger, ResourceKind.QUEUE_PAIR, log, cq, refuses=True)
    (refused,) = ledger.close()
    assert isinstance(refused, OSError) and refused.errno == errno.EIO
    assert log == [cq]


def test_registering_beside_closing() -> None:
    """Memory is registered on a thread of its own, while the loop closes connections."""
    ledger = DeviceResources("dev")
    cq = Child(ledger, ResourceKind.COMPLETION_QUEUE, [])
    errors: list[Exception] = []
    ended = threading.Event()
    for _ in range(2000):
        Child(ledger, ResourceKind.MEMORY_REGION, [])

    def register() -> None:
        try:
            while not ended.is_set():
                Child(ledger, ResourceKind.MEMORY_REGION, []).close()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=register)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(1000):
            Child(ledger, ResourceKind.QUEUE_PAIR, [], cq).close()
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not errors
    assert ledger.close() == []
    assert len(ledger) == 0
