"""Counting copies from outside: a library beneath all processes of a measurement adds up the bytes that they copy."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FILE", "counting", "so_far"]

SOURCE: Final = Path(__file__).with_name("copies.c")
FILE: Final = "COPIES_FILE"
"""The variable with the path of the file that has the number."""
_NUMBER: Final = struct.Struct("@Q")


def counting(folder: Path) -> Mapping[str, str]:
    """Build the library; the variables with which a program and its children count.

    Args:
        folder: for the library and the number. It must stay as long as the programs run.

    Raises:
        OSError: there is no C compiler, or it fails; the message has its words.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise OSError("copies are counted by a library that needs a C compiler: install gcc")
    library, number = folder / "copies.so", folder / "copies"
    command = [compiler, "-O2", "-fPIC", "-shared", "-fno-builtin", "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"the library that counts copies was not built: {done.stderr.strip()}")
    number.write_bytes(_NUMBER.pack(0))
    return {"LD_PRELOAD": str(library), FILE: str(number)}


def so_far() -> int:
    """Bytes that all processes with the file of this process's `FILE` have copied.

    Raises:
        KeyError: the program was not started with the variables of `counting`.
    """
    (found,) = _NUMBER.unpack(Path(os.environ[FILE]).read_bytes())
    return int(found)
