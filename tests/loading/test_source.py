"""The bytes of an array: checksums, and files that shrink."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.loading.samples import MIB, archive, refused, saved

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.slow
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
async def test_checksums(tmp_path: Path, compression: int) -> None:
    path = tmp_path / "a.npz"
    members = {"good.npy": saved(np.ones(1000)), "bad.npy": saved(np.random.default_rng(0).random(9 * MIB // 8))}
    data = bytearray(archive(members, compression))
    data[len(data) // 2] ^= 1  # among the elements of the second member
    path.write_bytes(data)
    refused(ValueError, r"member 'bad\.npy' is damaged: ", path)
    data = bytearray(archive({"none.npy": saved(np.ones(0))}, compression))
    at = data.index(b"PK\x01\x02") + 16
    data[at] ^= 1
    path.write_bytes(data)
    refused(ValueError, "none.npy.*CRC-32", path)


def shrinking(path: Path, nbytes: int) -> Callable[[int, int], None]:
    """A progress callable that cuts the file while it is read."""

    def cut(done: int, total: int) -> None:
        if done > total // 4:
            os.truncate(path, nbytes)

    return cut


@pytest.mark.slow
async def test_a_file_that_shrinks(tmp_path: Path) -> None:
    path, array = tmp_path / "file", np.random.default_rng(0).integers(0, 255, 30 * MIB, "u1")
    np.save(path.with_suffix(".npy"), array)
    refused(
        ValueError,
        "31,457,280 bytes of elements were expected and 20,971,392 found.*shrank",
        path.with_suffix(".npy"),
        progress=shrinking(path.with_suffix(".npy"), 20 * MIB),
    )
    array.tofile(path)
    match = "31,457,280 bytes of elements were expected and 20,971,520 found.*shrank"
    refused(ValueError, match, path, dtype="u1", progress=shrinking(path, 20 * MIB))
    for save, match in ((np.savez, "shrank"), (np.savez_compressed, "ended early|is damaged")):
        with path.open("wb") as file:
            save(file, first=np.ones(5), second=array)
        refused(ValueError, rf"member 'second\.npy'.*({match})", path, progress=shrinking(path, 20 * MIB))
