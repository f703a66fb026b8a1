"""Mappings of memfds, and the memfds that are accepted."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.transport.local_arena import memfd
from zcactor.errors import ProtocolError
from zcactor.objectstore.lease import Lease
from zcactor.transport import mapping as module
from zcactor.transport.mapping import STEP_BITS, ArenaFile, Mapping, PrivateMapping, Window, check_seals

NBYTES = 1 << 16


def mapped(address: int) -> bool:
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


def is_mapped(fd: int) -> bool:
    inode = os.fstat(fd).st_ino
    return any(int(line.split()[4]) == inode for line in Path("/proc/self/maps").read_text().splitlines())


def window_of(fd: int, nbytes: int = NBYTES, *, writable: bool = False) -> Window:
    """A window of all bytes of a file."""
    return Window(ArenaFile(fd, nbytes, writable=writable), 0, nbytes)


def test_shows_the_file_and_keeps_one_descriptor() -> None:
    with memfd(NBYTES) as fd:
        before = len(os.listdir("/proc/self/fd"))
        window = window_of(fd)
        assert len(os.listdir("/proc/self/fd")) == before + 1
        os.pwrite(fd, b"seen", 1000)
        assert ctypes.string_at(window.address + 1000, 4) == b"seen"
        window.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_writes_through() -> None:
    with memfd(NBYTES) as fd:
        mapping = window_of(fd, writable=True)
        ctypes.memmove(mapping.address + 5, b"there", 5)
        assert os.pread(fd, 5, 5) == b"there"
        mapping.close()


def opened_anew(fd: int, access: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)


@pytest.mark.parametrize("writable", [False, True])
def test_whether_it_is_the_only_one(writable: bool) -> None:
    with memfd(NBYTES) as fd:
        ours, theirs = opened_anew(fd, os.O_RDWR), opened_anew(fd, os.O_RDWR if writable else os.O_RDONLY)
        file, other = ArenaFile(ours, NBYTES, writable=True), window_of(theirs, writable=writable)
        os.close(ours)
    assert not file.is_the_only_one()
    os.close(theirs)
    assert not file.is_the_only_one(), "it is mapped"
    other.close()
    assert file.is_the_only_one()
    window = Window(file, 0, NBYTES)
    assert file.is_the_only_one(), "its own windows do not count"
    window.close()


def test_one_that_cannot_be_written_to_does_not_know() -> None:
    with memfd(NBYTES) as fd:
        assert not ArenaFile(fd, NBYTES).is_the_only_one()


def test_what_is_punched_goes_back_and_the_rest_stays() -> None:
    page = mmap.PAGESIZE
    with memfd(NBYTES) as fd:
        os.pwrite(fd, b"x" * NBYTES, 0)
        file = ArenaFile(fd, NBYTES, writable=True)
        mapping = Window(file, 0, NBYTES)
        file.punch([(page, page), (4 * page, 2 * page)])
        assert os.fstat(fd).st_blocks * 512 == 3 * page
        for number, byte in enumerate(b"0x00xx0"):
            found = ctypes.string_at(mapping.address + number * page, page)
            assert found == (b"x" if byte == ord("x") else b"\0") * page
        file.punch([])
        assert os.fstat(fd).st_blocks == 0
        mapping.close()
        read_only = opened_anew(fd, os.O_RDONLY)
        with pytest.raises(OSError, match="cannot give back"):
            ArenaFile(read_only, NBYTES).punch([])
        os.close(read_only)


def test_close_is_idempotent_and_so_is_letting_go() -> None:
    with memfd(NBYTES) as fd:
        mapping = window_of(fd)
        address = mapping.address
        assert mapped(address)
        mapping.close()
        mapping.close()
        assert mapping.address == 0
        assert not mapped(address)
        mapping = window_of(fd)
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
            window_of(read_only, writable=True)
        os.close(read_only)
    assert refused.value.errno == errno.EACCES


def test_nothing_is_unmapped_at_exit() -> None:
    with memfd(NBYTES) as fd:
        mapping = window_of(fd)
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
            mapping = window_of(fd)
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
            mapping = window_of(fd)
            for text in (b"first", b"other"):
                os.pwrite(fd, text, 0)
                array = np.asarray(mapping.private(0, 5, None))
                assert array.tobytes() == text
                array[:] = 1

    def test_unmaps_and_lets_go_with_the_last_array(self) -> None:
        class Keep:
            pass

        with memfd(NBYTES) as fd:
            mapping = window_of(fd)
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
            assert window_of(fd).private(offset, nbytes, None) is None

    def test_bytes_of_another_window_are_refused(self) -> None:
        page = mmap.PAGESIZE
        with memfd(NBYTES) as fd:
            window = Window(ArenaFile(fd, NBYTES), page, page)
            assert window.private(page, page, None) is not None
            assert window.private(page - 1, 2, None) is window.private(2 * page - 1, 2, None) is None


def mappings() -> int:
    """The number of mappings of this process."""
    return len(Path("/proc/self/maps").read_text().splitlines())


# ---------------------------------------------------------------- pages from elsewhere


def test_other_pages_in_the_place_of_these() -> None:
    """Addresses stay, and so do the bytes, which the caller has copied; the rest of the file is let go."""
    page = mmap.PAGESIZE
    with memfd(8 * page) as first, memfd(4 * page) as second:
        os.pwrite(first, bytes(range(8)) * page, 0)
        mapping = window_of(first, 8 * page)
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
        mapping = window_of(fd, 2 * page)
        for wrong in ((page, page, -1, 0), (page, page, fd, 1)):
            with pytest.raises(OSError, match="cannot map"):
                mapping.replace(*wrong)
        assert ctypes.string_at(mapping.address, 2 * page) == b"\5" * 2 * page
        mapping.give_up([(0, page), (page, page)])
        assert ctypes.string_at(mapping.address, 2 * page) == b"\5" * 2 * page
        mapping.close()


# ---------------------------------------------------------------- windows

STEP = 1 << STEP_BITS
ARENA = 12 << 40 - 2
"""Bytes of an arena on a host of about 12 TiB: 3 TiB, most of which is never touched."""


def address_space() -> int:
    """Bytes of address space that this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@pytest.fixture(scope="module")
def large() -> Iterator[int]:
    with memfd(ARENA) as fd:
        yield fd


borders = st.sampled_from([0, 1, STEP - 1, STEP, STEP + 1, 2 * STEP, 5 * STEP - 3, ARENA // 2, ARENA - STEP, ARENA])
lengths = st.sampled_from([0, 1, 4096, STEP - 1, STEP, STEP + 1, 2 * STEP, 3 * STEP + 7, 64 * STEP, ARENA // 2, ARENA])


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(borders, st.integers(-2, 2), lengths), min_size=1, max_size=6))
def test_each_region_lies_in_its_window(large: int, wanted: list[tuple[int, int, int]]) -> None:
    """At each place: its bytes are those of the file, it has one address, and its window is little larger."""
    mapping = Mapping(large, ARENA)
    for border, shift, nbytes in wanted:
        offset = min(max(border + shift, 0), ARENA)
        nbytes = min(nbytes, ARENA - offset)
        mapped = mapping.map(offset, nbytes)
        window = mapped.owner
        assert type(window) is Window
        assert window.low <= offset <= offset + nbytes <= window.end == window.low + window.nbytes
        assert mapped.address == window.base + offset and mapped.nbytes == nbytes
        assert window.nbytes <= max(2 * STEP, 4 * nbytes)
        assert mapping.map(offset, nbytes).owner is window
        for at in {offset, offset + nbytes - 1} if nbytes else ():
            os.pwrite(large, bytes([at % 251]), at)
            assert ctypes.string_at(window.base + at, 1) == bytes([at % 251])


def test_a_thousand_peers_on_a_host_of_12_tib(large: int) -> None:
    """Their arenas have 3,000 TiB, where an address space has 128."""
    before = address_space()
    mappings = [Mapping(large, ARENA) for _ in range(1000)]
    mapped = [mapping.map(number * STEP, 4096) for number, mapping in enumerate(mappings)]
    assert len({each.address for each in mapped}) == 1000
    assert address_space() - before <= 1000 * 2 * STEP + (1 << 30)
    os.pwrite(large, b"here", 7 * STEP)
    assert ctypes.string_at(mapped[7].address, 4) == b"here"


def test_windows_that_nothing_points_into_go_where_there_are_many(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_NBYTES", 20 * STEP)
    monkeypatch.setattr(module, "_space", module._Space())
    mapping, other = Mapping(large, ARENA), Mapping(large, ARENA)
    read = mapping.map(0, 1)
    lease = Lease(b"o" * 16, 1, 4 * STEP, 8, 0, None, lambda _: None)
    window = mapping.window(4 * STEP, 8)
    lease.place(window.base + 4 * STEP, window)
    before = address_space()
    for number in range(200):
        (mapping, other)[number % 2].map(2 * number * STEP, 8)
    assert address_space() - before <= 21 * STEP
    assert mapping.map(0, 1).owner is read.owner, "it was read all the time"
    assert mapping.window(4 * STEP, 8) is lease.mapping, "an array lies in it"
    os.pwrite(large, b"held", 4 * STEP)
    assert ctypes.string_at(lease.address, 4) == b"held"


def test_windows_that_are_all_used_stay(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_NBYTES", 4 * STEP)
    monkeypatch.setattr(module, "_space", module._Space())
    mapping = Mapping(large, ARENA)
    used = [mapping.map(2 * number * STEP, 8) for number in range(50)]
    assert len({each.address for each in used}) == 50
    for number in (0, 49):
        os.pwrite(large, b"used", 2 * number * STEP)
        assert ctypes.string_at(used[number].address, 4) == b"used"


def test_a_window_goes_with_the_last_that_points_into_it() -> None:
    with memfd(NBYTES) as fd:
        mapping = Mapping(fd, NBYTES)
        mapped = mapping.map(5, 10)
        window = mapped.owner
        assert isinstance(window, Window) and window.in_use
        del mapping, window
        assert is_mapped(fd)
        del mapped
        assert not is_mapped(fd)


def test_use_ends_with_the_last_of_the_bytes() -> None:
    with memfd(NBYTES) as fd:
        window = window_of(fd)
        used = [window.in_use]
        first, second = window.map(0, 5), window.map(5, 5)
        del first
        used.append(window.in_use)
        del second
        assert [*used, window.in_use] == [False, True, False]


LIMITED = """
import os, resource, sys
from zcactor.errors import OutOfMemory
from zcactor.transport.mapping import Mapping, STEP_BITS
step = 1 << STEP_BITS
fd = os.memfd_create("arena")
os.ftruncate(fd, 1 << 40)
first, second = Mapping(fd, 1 << 40), Mapping(fd, 1 << 40)
used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + 5 * step, used + 5 * step))
for number in range(20):  # each takes two steps: those before are dropped
    (first, second)[number % 2].map(2 * number * step, 1)
kept = [first.map(2 * number * step, 1) for number in range(2)]
single = first.map(100 * step + 5000, 10)
assert single.owner.nbytes < 8192, "no window has room, but a page has"
try:
    first.map(0, 8 * step)
except OutOfMemory as error:
    print(error)
assert len({each.address for each in kept}) == 2
"""


def test_limited_address_space() -> None:
    """Unused windows are dropped first; then the bytes alone are mapped; then an error says which limit to raise."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "ulimit -v" in done.stdout and "vm.max_map_count" in done.stdout
