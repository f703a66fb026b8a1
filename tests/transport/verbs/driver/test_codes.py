"""Numbers of libibverbs and their names."""

from __future__ import annotations

from zcactor.transport.verbs.driver.codes import (
    CompletionStatus,
    EventType,
    Opcode,
    QpState,
    describe_event,
    describe_status,
)


def test_numbers_are_those_of_verbs_h() -> None:
    assert [CompletionStatus(number).name for number in (0, 4, 5, 10, 12, 13)] == [
        "SUCCESS",
        "LOC_PROT",
        "WR_FLUSH",
        "REM_ACCESS",
        "RETRY_EXC",
        "RNR_RETRY_EXC",
    ]
    assert (Opcode.SEND, Opcode.RDMA_READ, Opcode.RECV) == (0, 2, 128)
    assert (QpState.RESET, QpState.RTS, QpState.ERR) == (0, 3, 6)
    assert (EventType.QP_FATAL, EventType.DEVICE_FATAL, EventType.PORT_ERR, EventType.GID_CHANGE) == (1, 8, 10, 18)


def test_describe_status() -> None:
    assert describe_status(10).startswith("REM_ACCESS (10): the peer has no readable memory region")
    assert describe_status(21) == "GENERAL (21)"
    assert describe_status(77) == "status 77"


def test_describe_event() -> None:
    assert describe_event(10) == "PORT_ERR (10)"
    assert describe_event(77) == "event 77"
