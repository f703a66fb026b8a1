"""Other processes, and whether they have ended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from zcactor.device.fake import system
from zcactor.device.others import Other


def test_another_process() -> None:
    fd = system.extent(0, 4096)
    program = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], pass_fds=[fd], stdin=subprocess.PIPE) as child:
        other = Other(child.pid)
        assert not other.has_ended()
        opened = other.open(fd, writable=True)
        os.pwrite(opened, b"seen", 0)
        os.close(opened)
        with pytest.raises(FileNotFoundError):
            other.open(1 << 20, writable=False)
        child.communicate()
        assert other.has_ended()
        other.close()
        other.close()
        assert other.has_ended()
    assert os.pread(fd, 4, 0) == b"seen"
    os.close(fd)
    with pytest.raises(ProcessLookupError):
        Other(child.pid)
