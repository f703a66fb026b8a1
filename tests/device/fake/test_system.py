"""Mappings at chosen addresses, sealed memfds, and descriptors of other processes."""

from __future__ import annotations

import ctypes
import os
import tempfile

import pytest

from zcactor.device.fake import system
from zcactor.device.sealed import sealed_size


def test_an_extent_names_its_gpu_and_keeps_its_size() -> None:
    fd = system.extent(3, 8192)
    try:
        assert system.number_of(fd) == 3 and sealed_size(fd) == 8192
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
    assert system.number_of(fd) is None


def test_other_files_are_no_extents() -> None:
    with tempfile.TemporaryFile() as file:
        assert system.number_of(file.fileno()) is None
        assert sealed_size(file.fileno()) == -1


def test_a_file_at_reserved_addresses() -> None:
    address = system.reserved(8192)
    fd = system.extent(0, 4096)
    try:
        system.map_at(address + 4096, 4096, fd, writable=True)
        ctypes.memmove(address + 4096, b"hello", 5)
        assert os.pread(fd, 5, 0) == b"hello"
        system.anonymous(address + 4096, 4096)
        system.map_at(address + 4096, 4096, fd, writable=False)
        assert ctypes.string_at(address + 4096, 5) == b"hello"
    finally:
        system.unmapped(address, 8192)
        os.close(fd)


def test_a_reservation_that_is_too_large() -> None:
    with pytest.raises(OSError, match="cannot map"):
        system.reserved(1 << 62)
