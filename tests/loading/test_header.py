"""Headers of .npy files: every version, many fields, and garbage."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

import zcactor as zc
from tests.loading.samples import MAGIC, archive, assert_read, described, npy, refused, saved

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
async def test_versions_of_the_header(tmp_path: Path, version: tuple[int, int]) -> None:
    path = tmp_path / "array.npy"
    names = {(1, 0): "caf\xe9", (2, 0): "caf\xe9", (3, 0): "caf\xe9 \\ '\u4e2d\U0001f600"}
    array = np.zeros(3, [(names[version], "<i4"), ("b", "<f8")])
    array[names[version]] = [1, 2, 3]
    path.write_bytes(npy(described("(3,)", repr(array.dtype.descr)), array.tobytes(), version))
    assert_read(zc.load(path), array)
    assert_read(zc.load(path), np.load(path))


async def test_a_header_of_many_fields(tmp_path: Path) -> None:
    array = np.ones(2, [(f"field {number}", "f4") for number in range(3000)])  # NumPy has to be asked to read it
    path = tmp_path / "wide.npy"
    with path.open("wb") as file:
        np.lib.format.write_array(file, array, (2, 0))
    assert_read(zc.load(path), array)


HUGE = str((1 << 40, 1 << 10))
GARBAGE: list[tuple[bytes, str]] = [
    (npy(described("(3,)"), bytes(23)), r"\(3,\) of dtype float64 takes 24 bytes, 23 were found"),
    (npy(described("()"), bytes(7)), r"takes 8 bytes, 7 were found"),
    (npy(described(HUGE), bytes(80)), r"takes 9,007,199,254,740,992 bytes, 80 were found"),
    (npy(described("(1 << 40,)"), bytes(80)), "no valid .npy header"),
    (npy(described(str((1 << 62, 1 << 62))), bytes(80)), "no array of that shape"),
    (npy(described(str((1 << 62, 0, 1 << 62))), bytes(80)), "no array of that shape"),
    (npy(described("(0x" + "f" * 9000 + ",)"), bytes(80)), "no array of that shape"),
    (npy(described(str((1,) * 65)), bytes(80)), "no array of that shape"),
    (npy(described("(-3,)"), bytes(80)), "negative"),
    (npy(described("(3.0,)"), bytes(80)), "shape is not valid"),
    (npy(described("3"), bytes(80)), "shape is not valid"),
    (npy(described("(3,)", "'no such'"), bytes(80)), "descr is not a valid dtype"),
    (npy(described("(3,)", "()"), bytes(80)), "no valid .npy header"),
    (npy(described("(3,)", "[(1, 2, 3, 4)]"), bytes(80)), "no valid .npy header"),
    (npy(described("(3,)", "('<f4', (2,))"), bytes(80)), "shape of its own"),
    (npy(described("(3,)", fortran="1"), bytes(80)), "fortran_order"),
    (npy("{'descr': '<f8', 'shape': ()}", bytes(80)), "correct keys"),
    (npy("[1, 2]", bytes(80)), "not a dictionary"),
    (npy("(" * 50_000, bytes(80)), "no valid .npy header"),
    (npy("-" * 50_000 + "1", bytes(80)), "no valid .npy header"),
    (npy(b"\xff\xfe\x00\x01", bytes(80)), "no valid .npy header"),
    (npy(b"\xff\xfe", bytes(80), (3, 0)), "utf-8"),
    (npy(described("(3,)"), bytes(24), (4, 2)), r"version 4\.2 is none of 1\.0, 2\.0 and 3\.0"),
    (npy("", length=200), "expected 200 bytes got 0"),
    (npy("{}", version=(2, 0), length=4_000_000_000), "4,000,000,000 bytes, 262,144 are the limit"),
    (npy("{}", version=(3, 0), length=4_000_000_000), "4,000,000,000 bytes, 262,144 are the limit"),
    (npy("{}", version=(3, 0), length=100), "100 bytes were expected and 2 found"),
    (MAGIC, "no valid .npy header"),
    (MAGIC + b"\x01\x00\x10", "no valid .npy header"),
]


@pytest.mark.slow
async def test_garbage(tmp_path: Path) -> None:
    path = tmp_path / "garbage.npy"
    for data, match in GARBAGE:
        path.write_bytes(data)
        refused(ValueError, match, path)
        for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            path.write_bytes(archive({"good.npy": saved(np.ones(3)), "bad.npy": data}, compression))
            refused(ValueError, "member 'bad.npy'", path)
