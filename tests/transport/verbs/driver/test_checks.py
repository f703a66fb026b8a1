"""Checks that all bindings share."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from zcactor.transport.verbs.driver.base import (
    MAX_U24,
    MAX_U32,
    MAX_U64,
    PathAttributes,
    QpAddress,
    Read,
    Receive,
    Send,
    VerbsError,
)
from zcactor.transport.verbs.driver.checks import (
    check_depth,
    check_dma_buf,
    check_not_closed,
    check_path,
    check_reads,
    check_receives,
    check_region,
    check_sends,
    dma_buf_error,
    new_psn,
    registration_error,
)


def test_new_psns_are_random_and_fit_their_field() -> None:
    found = {new_psn() for _ in range(1000)}
    assert len(found) > 990 and all(0 <= psn <= MAX_U24 for psn in found)


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


def test_check_dma_buf() -> None:
    check_dma_buf(1)
    check_dma_buf(1 << 40)
    for nbytes in (0, -1, MAX_U64 + 1):
        with pytest.raises(VerbsError, match="positive"):
            check_dma_buf(nbytes)


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.EOPNOTSUPP, "by dma-buf"), (errno.ENOMEM, "MEMLOCK"), (errno.EINVAL, "open kernel modules")],
)
def test_dma_buf_error(number: int, hint: str) -> None:
    error = dma_buf_error(number, 4096, "mlx5_0")
    assert error.errno == number
    assert "mlx5_0 cannot register a dma-buf of 4,096 bytes" in str(error) and hint in str(error)


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
