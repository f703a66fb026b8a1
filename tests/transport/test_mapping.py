"""Mappings of memfds, and which memfds are accepted."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from pathlib import Path

import pytest

from tests.transport.local_arena import memfd
from zcactor.errors import ProtocolError
from zcactor.transport.mapping import Mapping, check_seals

NBYTES = 1 << 16


def mapped(address: int) -> bool:
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


def test_shows_the_file_and_keeps_no_descriptor() -> None:
    with memfd(NBYTES) as fd:
        before = len(os.listdir("/proc/self/fd"))
        mapping = Mapping(fd, NBYTES)
        assert len(os.listdir("/proc/self/fd")) == before
        os.pwrite(fd, b"seen", 1000)
    assert ctypes.string_at(mapping.address + 1000, 4) == b"seen"
    mapping.close()


def test_writes_through() -> None:
    with memfd(NBYTES) as fd:
        mapping = Mapping(fd, NBYTES, writable=True)
        ctypes.memmove(mapping.address + 5, b"there", 5)
        assert os.pread(fd, 5, 5) == b"there"
        mapping.close()


def test_close_is_idempotent_and_so_is_letting_go() -> None:
    with memfd(NBYTES) as fd:
        mapping = Mapping(fd, NBYTES)
        address = mapping.address
        assert mapped(address)
        mapping.close()
        mapping.close()
        assert mapping.address == 0
        assert not mapped(address)
        mapping = Mapping(fd, NBYTES)
        address = mapping.address
        other_holder = mapping
        del mapping
        assert mapped(address)
        del other_holder
        assert not mapped(address)


def test_read_only_descriptor_cannot_be_mapped_writable() -> None:
    with memfd(NBYTES) as fd:
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        with pytest.raises(OSError, match="cannot map") as refused:
            Mapping(read_only, NBYTES, writable=True)
        os.close(read_only)
    assert refused.value.errno == errno.EACCES


def test_nothing_is_unmapped_at_exit() -> None:
    with memfd(NBYTES) as fd:
        mapping = Mapping(fd, NBYTES)
        mapping.__del__(lambda: True)
        assert mapping.address
        mapping.__del__(lambda: False)
        assert mapping.address == 0


def test_sealed_memfd_of_the_right_size_is_accepted() -> None:
    with memfd(NBYTES) as fd:
        check_seals(fd, NBYTES)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_unsealed_memfd(seals: int) -> None:
    with memfd(NBYTES, seals) as fd, pytest.raises(ProtocolError, match="not sealed"):
        check_seals(fd, NBYTES)


@pytest.mark.parametrize("announced", [NBYTES - 1, NBYTES + 1, 0])
def test_wrong_size(announced: int) -> None:
    with memfd(NBYTES) as fd, pytest.raises(ProtocolError, match="announced"):
        check_seals(fd, announced)


def test_pipe_is_no_arena() -> None:
    reader, writer = os.pipe()
    with pytest.raises(ProtocolError, match="not a memfd"):
        check_seals(reader, NBYTES)
    os.close(reader)
    os.close(writer)
