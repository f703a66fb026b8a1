"""A store on a kernel whose pages have 64 KiB, which a library in C plays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = Path(__file__).with_name("large_pages.c")
PROGRAM = """
import ctypes, mmap, os
from zcactor.objectstore.store import Store

store = Store(8 << 20, bytes(16))
apart = store.allocate(4 * mmap.PAGESIZE)
blocks = [apart, store.allocate(20 << 10), store.allocate(64)]
words = [ctypes.c_int.from_address(block.address) for block in blocks[1:]]
(asked, ask), (answered, answer) = os.pipe(), os.pipe()
if os.fork() == 0:
    os.read(asked, 1)
    os.write(answer, bytes(word.value for word in words))
    os._exit(0)
for word in words:
    word.value = 1
os.write(ask, b"?")
print(mmap.PAGESIZE, apart.offset % mmap.PAGESIZE, [*os.read(answered, 2)])
"""


def test_a_child_sees_the_bytes_of_the_moment_of_the_fork(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler `cc`")
    library = tmp_path / "large_pages.so"
    subprocess.run([compiler, "-shared", "-fPIC", str(LIBRARY), "-o", str(library), "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | {"LD_PRELOAD": str(library)}, capture_output=True, text=True,
        check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "65536 0 [0, 0]\n"
