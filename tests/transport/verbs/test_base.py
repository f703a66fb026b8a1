"""Numbers, names and limits of the verbs interface."""

from __future__ import annotations

import errno
import ipaddress
from dataclasses import replace

import pytest

from zcactor.transport.verbs.base import (
    MAX_U24,
    MAX_U32,
    MAX_U64,
    CompletionStatus,
    EventType,
    Gid,
    Opcode,
    PathAttributes,
    QpAddress,
    QpState,
    Read,
    Receive,
    Send,
    VerbsError,
    check_depth,
    check_not_closed,
    check_path,
    check_reads,
    check_receives,
    check_region,
    check_sends,
    describe_event,
    describe_status,
    new_psn,
    registration_error,
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


def test_new_psns_are_random_and_fit_their_field() -> None:
    found = {new_psn() for _ in range(1000)}
    assert len(found) > 990 and all(0 <= psn <= MAX_U24 for psn in found)


def test_describe_event() -> None:
    assert describe_event(10) == "PORT_ERR (10)"
    assert describe_event(77) == "event 77"


@pytest.mark.parametrize(
    ("text", "address", "link_local"),
    [
        ("::ffff:10.9.0.1", "10.9.0.1", False),
        ("fe80::5054:ff:fe12:3456", "fe80::5054:ff:fe12:3456", True),
        ("2001:db8::7", "2001:db8::7", False),
    ],
)
def test_gid(text: str, address: str, link_local: bool) -> None:
    gid = Gid(3, ipaddress.IPv6Address(text).packed, True)
    assert gid.address == address
    assert gid.link_local is link_local


def test_check_not_closed() -> None:
    check_not_closed(False, "thing")
    with pytest.raises(VerbsError, match="the thing is closed"):
        check_not_closed(True, "thing")


def test_check_depth() -> None:
    check_depth(1, 4, "depth", "max")
    check_depth(4, 4, "depth", "max")
    for value in (0, 5):
        with pytest.raises(VerbsError, match=rf"depth is {value}; the device takes 1 to 4 \(max\)"):
            check_depth(value, 4, "depth", "max")


def test_check_region() -> None:
    check_region(4096, 1 << 40)
    for address, nbytes in ((0, 1), (1, 0), (MAX_U64, 2)):
        with pytest.raises(VerbsError):
            check_region(address, nbytes)


@pytest.mark.parametrize(
    ("receive", "match"),
    [
        (Receive(-1, 0, 1, 1), "wr_id"),
        (Receive(MAX_U64 + 1, 0, 1, 1), "wr_id"),
        (Receive(1, -1, 1, 1), "address"),
        (Receive(1, MAX_U64, 1, 1), "address"),
        (Receive(1, 1, -1, 1), "bytes"),
        (Receive(1, 1, MAX_U32 + 1, 1), "32 bits"),
        (Receive(1, 1, 1, MAX_U32 + 1), "lkey"),
    ],
)
def test_check_receives(receive: Receive, match: str) -> None:
    check_receives([Receive(MAX_U64, MAX_U64, 0, MAX_U32), Receive(0, 0, MAX_U32, 0)])
    with pytest.raises(VerbsError, match=match):
        check_receives([Receive(0, 0, 1, 0), receive])


def test_check_sends() -> None:
    check_sends([Send(1, 1, 100, 1), Send(1, 1, 8, 0, inline=True)], 8, 100)
    with pytest.raises(VerbsError, match="max_msg_sz"):
        check_sends([Send(1, 1, 101, 1)], 8, 100)
    with pytest.raises(VerbsError, match="carries 8"):
        check_sends([Send(1, 1, 9, 1, inline=True)], 8, 100)


def test_check_reads() -> None:
    check_reads([Read(1, 1, 100, 1, MAX_U64 - 100, MAX_U32)], 100)
    for read, match in (
        (Read(1, 1, 101, 1, 1, 1), "max_msg_sz"),
        (Read(1, 1, 2, 1, MAX_U64, 1), "remote address"),
        (Read(1, 1, 2, 1, -1, 1), "remote address"),
        (Read(1, 1, 2, 1, 1, -1), "rkey"),
    ):
        with pytest.raises(VerbsError, match=match):
            check_reads([read], 100)


def test_a_port_may_promise_more_than_a_request_can_carry() -> None:
    with pytest.raises(VerbsError, match="32 bits"):
        check_reads([Read(1, 1, MAX_U32 + 1, 1, 1, 1)], 1 << 40)


def test_check_path() -> None:
    remote, path = QpAddress(1, 2, bytes(16), 3, 5), PathAttributes(1, 0, 1, 5)
    check_path(remote, path)
    for bad_remote, bad_path, match in (
        (replace(remote, qpn=1 << 24), path, "QpAddress.qpn"),
        (replace(remote, psn=-1), path, "QpAddress.psn"),
        (replace(remote, gid=b"x"), path, "16"),
        (replace(remote, lid=1 << 16), path, "QpAddress.lid"),
        (remote, replace(path, mtu=0), "PathAttributes.mtu"),
        (remote, replace(path, retry_count=7), "retry_count is 7; 0 to 6"),
        (remote, replace(path, rnr_retry=7), "rnr_retry"),
        (remote, replace(path, timeout=0), "timeout"),
    ):
        with pytest.raises(VerbsError, match=match):
            check_path(bad_remote, bad_path)


def test_registration_error() -> None:
    error = registration_error(errno.ENOMEM, 4096, 1 << 20, "rxe0")
    assert error.errno == errno.ENOMEM
    assert "rxe0 cannot register 1,048,576 bytes at 0x1000" in str(error)
    assert "ulimit -l" in str(error)
    assert "write access" in str(registration_error(errno.EFAULT, 1, 1, "rxe0"))
