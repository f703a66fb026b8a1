"""Memory of a fixed size: nobody can shorten it."""

from __future__ import annotations

import os
import tempfile

import pytest

from zcactor.device.sealed import sealed_memory, sealed_size


def test_its_size_is_fixed() -> None:
    fd = sealed_memory("zcactor-test", 8192)
    try:
        assert sealed_size(fd) == 8192
        for nbytes in (0, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)
    finally:
        os.close(fd)


@pytest.mark.usefixtures("no_leftovers")
def test_what_the_system_refuses_leaves_nothing() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Invalid argument"):
        sealed_memory("zcactor-test", -1)
    assert os.listdir("/proc/self/fd") == before


def test_other_files() -> None:
    with tempfile.TemporaryFile() as file:
        assert sealed_size(file.fileno()) == -1
    fd = os.memfd_create("zcactor-test", os.MFD_ALLOW_SEALING)
    try:
        assert sealed_size(fd) == -1
    finally:
        os.close(fd)
