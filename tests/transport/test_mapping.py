"""Mappings of memfds, and the memfds that are accepted."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import pytest

from tests.transport.local_arena import memfd
from zcactor.errors import ProtocolError
from zcactor.transport.mapping import Mapping, PrivateMapping, check_seals

NBYTES = 1 << 16


def mapped(address: int) -> bool:
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


def is_mapped(fd: int) -> bool:
    inode = os.fstat(fd).st_ino
    return any(int(line.split()[4]) == inode for line in Path("/proc/self/maps").read_text().splitlines())


def test_shows_the_file_and_keeps_no_descriptor() -> None:
    with memfd(NBYTES) as fd:
        before = len(os.listdir("/proc/self/fd"))
        mapping = Mapping(fd, NBYTES)
        assert len(os.listdir("/proc/self/fd")) <= before
        os.pwrite(fd, b"seen", 1000)
    assert ctypes.string_at(mapping.address + 1000, 4) == b"seen"
    mapping.close()


def test_writes_through() -> None:
    with memfd(NBYTES) as fd:
        mapping = Mapping(fd, NBYTES, writable=True)
        ctypes.memmove(mapping.address + 5, b"there", 5)
        assert os.pread(fd, 5, 5) == b"there"
        mapping.close()


def opened_anew(fd: int, access: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)


@pytest.mark.parametrize("writable", [False, True])
def test_whether_it_is_the_only_one(writable: bool) -> None:
    with memfd(NBYTES) as fd:
        ours, theirs = opened_anew(fd, os.O_RDWR), opened_anew(fd, os.O_RDWR if writable else os.O_RDONLY)
        mapping, other = Mapping(ours, NBYTES, writable=True), Mapping(theirs, NBYTES, writable=writable)
        os.close(ours)
    assert not mapping.is_the_only_one()
    os.close(theirs)
    assert not mapping.is_the_only_one(), "it is mapped"
    other.close()
    assert mapping.is_the_only_one()
    mapping.close()
    assert not mapping.is_the_only_one()


def test_one_that_cannot_be_written_to_does_not_know() -> None:
    with memfd(NBYTES) as fd:
        mapping = Mapping(fd, NBYTES)
        assert not mapping.is_the_only_one()
        mapping.close()


def test_what_is_punched_goes_back_and_the_rest_stays() -> None:
    page = mmap.PAGESIZE
    with memfd(NBYTES) as fd:
        os.pwrite(fd, b"x" * NBYTES, 0)
        mapping = Mapping(fd, NBYTES, writable=True)
        mapping.punch([(page, page), (4 * page, 2 * page)])
        assert os.fstat(fd).st_blocks * 512 == 3 * page
        for number, byte in enumerate(b"0x00xx0"):
            found = ctypes.string_at(mapping.address + number * page, page)
            assert found == (b"x" if byte == ord("x") else b"\0") * page
        mapping.punch([])
        assert os.fstat(fd).st_blocks == 0
        mapping.close()
        read_only = opened_anew(fd, os.O_RDONLY)
        with pytest.raises(OSError, match="cannot give back"):
            Mapping(read_only, NBYTES).punch([])
        os.close(read_only)


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


class TestPrivate:
    def test_writes_are_seen_by_nobody_else(self) -> None:
        with memfd(NBYTES) as fd:
            os.pwrite(fd, b"shared bytes", 5000)
            mapping = Mapping(fd, NBYTES, spare=True)
            for private in (mapping.private(5000, 12, None), PrivateMapping.of(fd, 5000, 12, None)):
                array = np.asarray(private)
                assert array.tobytes() == b"shared bytes"
                array[:6] = 0
                assert os.pread(fd, 12, 5000) == b"shared bytes"
                again = mapping.private(5000, 12, None)
                assert np.asarray(again).tobytes() == b"shared bytes"
                assert ctypes.string_at(mapping.address + 5000, 12) == b"shared bytes"

    def test_shows_what_the_file_holds_when_it_is_made(self) -> None:
        # The same range is mapped again after its bytes became another object's: no page of an earlier one may be left.
        with memfd(NBYTES) as fd:
            mapping = Mapping(fd, NBYTES, spare=True)
            for text in (b"first", b"other"):
                os.pwrite(fd, text, 0)
                array = np.asarray(mapping.private(0, 5, None))
                assert array.tobytes() == text
                array[:] = 1

    def test_unmaps_and_lets_go_with_the_last_array(self) -> None:
        class Keep:
            pass

        with memfd(NBYTES) as fd:
            mapping = Mapping(fd, NBYTES, spare=True)
            before = mappings()
            keep = Keep()
            kept = weakref.ref(keep)
            view = np.asarray(mapping.private(100, 200, keep))[7:]
            del keep
            mapping.close()
            assert kept() is not None
            view[0] = 1
            del view
            assert kept() is None
            assert mappings() <= before

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (-1, 5), (NBYTES - 4, 5), (0, NBYTES + 1), (2**63, 1)])
    def test_range_outside_is_refused(self, offset: int, nbytes: int) -> None:
        with memfd(NBYTES) as fd:
            assert Mapping(fd, NBYTES, spare=True).private(offset, nbytes, None) is None

    def test_needs_a_spare_mapping(self) -> None:
        with memfd(NBYTES) as fd:
            assert Mapping(fd, NBYTES).private(0, 5, None) is None


def mappings() -> int:
    """The number of mappings of this process."""
    return len(Path("/proc/self/maps").read_text().splitlines())


# ---------------------------------------------------------------- pages from elsewhere


def test_other_pages_in_the_place_of_these() -> None:
    """Addresses stay, and so do the bytes, which the caller has copied; the rest of the file is let go."""
    page = mmap.PAGESIZE
    with memfd(8 * page) as first, memfd(4 * page) as second:
        os.pwrite(first, bytes(range(8)) * page, 0)
        mapping = Mapping(first, 8 * page, spare=True)
        view = (ctypes.c_ubyte * (8 * page)).from_address(mapping.address)
        before = bytes(view[2 * page : 4 * page])
        os.pwrite(second, before, page)
        mapping.replace(2 * page, 2 * page, second, page)
        assert bytes(view[2 * page : 4 * page]) == before
        os.pwrite(second, b"\xff", page)
        assert view[2 * page] == 255, "it is the other file"
        assert view[0] == 0 and view[5 * page + 1] == 1, "and the rest as it was"
        assert mapping.private(0, 1, None) is not None
        mapping.give_up([(2 * page, 2 * page)])
        assert mapping.private(0, 1, None) is None
        assert not is_mapped(first) and is_mapped(second)
        assert all(mapped(mapping.address + at * page) for at in range(8)), "nothing else can be mapped in between"
        del view
        mapping.close()
        assert not is_mapped(second)


def test_pages_that_cannot_be_replaced_stay() -> None:
    page = mmap.PAGESIZE
    with memfd(2 * page) as fd:
        os.pwrite(fd, b"\5" * 2 * page, 0)
        mapping = Mapping(fd, 2 * page)
        for wrong in ((page, page, -1, 0), (page, page, fd, 1)):
            with pytest.raises(OSError, match="cannot map"):
                mapping.replace(*wrong)
        assert ctypes.string_at(mapping.address, 2 * page) == b"\5" * 2 * page
        mapping.give_up([(0, page), (page, page)])
        assert ctypes.string_at(mapping.address, 2 * page) == b"\5" * 2 * page
        mapping.close()
