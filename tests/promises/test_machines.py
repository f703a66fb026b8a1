"""Machines that cannot run zcactor are refused at the start, and not by wrong bytes later."""

from __future__ import annotations

import subprocess
import sys


def test_a_big_endian_machine_is_refused_at_the_import() -> None:
    program = "import sys; sys.byteorder = 'big'; import zcactor"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ImportError: zcactor needs a little-endian machine, and this one is big-endian" in done.stderr
