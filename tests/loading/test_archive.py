"""Archives: names, members that are no arrays, and impossible sizes."""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

import zcactor as zc
from tests.loading.samples import archive, assert_read, described, npy, refused, saved

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_npz_names_and_no_members(tmp_path: Path) -> None:
    path = tmp_path / "several"  # the suffix does not matter
    path.write_bytes(archive({"dir/a.npy": saved(np.arange(3)), "b": saved(np.float32(2)), "c.npy.npy": saved([])}))
    arrays = zc.load(path)
    assert type(arrays) is dict
    assert list(arrays) == ["dir/a", "b", "c.npy"]
    assert_read(arrays["dir/a"], np.arange(3))
    assert_read(arrays["b"], np.array(2, "f4"))
    path.write_bytes(archive({}))
    assert zc.load(path) == {}
    np.savez(tmp_path / "by text.npz", a=np.arange(5))
    assert_read(zc.load(os.fspath(tmp_path / "by text.npz"))["a"], np.arange(5))


async def test_archives_of_something_else(tmp_path: Path) -> None:
    path, good = tmp_path / "a.npz", saved(np.ones(3))
    cases: list[tuple[bytes, str]] = [
        (archive({"a.npy": good, "b.txt": b"some text"}), r"member 'b\.txt' has no valid \.npy header"),
        (archive({"a.npy": good, "b/": b""}), "member 'b/' has no valid"),
        (archive({"a.npy": good, "a": good}), "member 'a': another member"),
        (archive({"a.npy": good}, zipfile.ZIP_LZMA), "compressed by method 14"),
        (archive({"a.npy": good}, zipfile.ZIP_BZIP2), "compressed by method 12"),
        (archive({"a.npy": good + b"more"}), "takes 24 bytes, 28 were found"),
        (archive({"a.npy": good + b"more"}, zipfile.ZIP_DEFLATED), "takes 24 bytes, 28 were found"),
        (archive({"a.npy": good})[:-30], "no valid .npz"),
        (archive({"a.npy": good})[:40], "no valid .npz"),
        (b"PK\x03\x04", "no valid .npz"),
    ]
    hidden = bytearray(archive({"a.npy": good, "b.npy": good}))
    hidden[hidden.index(b"PK\x01\x02") + 32] = 51  # a comment that is as long as the rest
    cases.append((bytes(hidden), "its directory has 2 members, 1 were found"))
    cases.append((archive({"a.npy": good}) + b"more", "does not end where the file does"))
    encrypted = bytearray(archive({"a.npy": good}))
    for at in (6, encrypted.index(b"PK\x01\x02") + 8):
        encrypted[at] |= 1
    cases.append((bytes(encrypted), "encrypted"))
    for data, match in cases:
        path.write_bytes(data)
        refused(ValueError, match, path)


async def test_archives_that_claim_too_much(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    header = npy(described("(16777216,)"))
    for compression, match in ((zipfile.ZIP_STORED, "claims 134"), (zipfile.ZIP_DEFLATED, "claims 134")):
        data = bytearray(archive({"a.npy": header}, compression))
        struct.pack_into("<I", data, data.index(b"PK\x01\x02") + 24, len(header) + (128 << 20))
        path.write_bytes(data)
        refused(ValueError, match, path)
    data = bytearray(archive({"a.npy": header}))
    for at in (20, 24):  # more bytes, stored and compressed, than the file has
        struct.pack_into("<I", data, data.index(b"PK\x01\x02") + at, len(header) + (128 << 20))
    path.write_bytes(data)
    refused(ValueError, "would end at byte 134|Overlapped entries", path)  # from Python 3.13 on zipfile itself looks
    data = bytearray(archive({"a.npy": saved(np.zeros(5000))}, zipfile.ZIP_DEFLATED))
    struct.pack_into("<I", data, data.index(b"PK\x01\x02") + 24, len(saved(np.zeros(5001))))
    path.write_bytes(data)
    refused(ValueError, "takes 40,000 bytes, 40,008 were found", path)
