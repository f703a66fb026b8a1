"""Copies are counted beneath a program, its children included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.paths import copies

PROGRAM = """
import ctypes, os, sys
from benchmarks.paths.copies import so_far
source, target = bytes(1 << 20), bytearray(1 << 20)
before = so_far()
{}
print(so_far() - before)
"""
ROOT = Path(__file__).resolve().parents[3]


def counted(folder: Path, work: str) -> int:
    """The bytes that a program counts while it does `work`."""
    environment = {**os.environ, **copies.counting(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(work)], env=environment, capture_output=True, text=True, check=True,
        timeout=50,
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "nbytes"),
    [
        ("pass", 0),
        ("memoryview(target)[:] = source", 1 << 20),
        ("ctypes.memmove((ctypes.c_char * 4096)(), source, 4096)", 4096),
        ("ctypes.memmove((ctypes.c_char * 4095)(), source, 4095)", 0),
        ("bytearray(source)", 1 << 20),
        ("if os.fork() == 0: bytearray(source); os._exit(0)\nos.wait()", 1 << 20),
    ],
)
def test_bytes(tmp_path: Path, work: str, nbytes: int) -> None:
    assert counted(tmp_path, work) == nbytes


def test_there_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="install gcc"):
        copies.counting(tmp_path)


def test_the_compiler_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no such thing >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(OSError, match="was not built: no such thing"):
        copies.counting(tmp_path)


def test_a_program_that_was_not_started_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(copies.FILE, raising=False)
    with pytest.raises(KeyError):
        copies.so_far()
