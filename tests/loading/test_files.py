"""Files of any kind: the results of `load`, and the files and arguments that it refuses."""

from __future__ import annotations

import asyncio
import io
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import zcactor as zc
from tests.loading.samples import MAGIC, MIB, archive, assert_read, refused, saved
from tests.marshal.dtypes import DTYPES, filled
from tests.marshal.wire import assert_same
from zcactor.process import context

pytestmark = pytest.mark.asyncio(loop_scope="module")


@zc.actor
class Reader:
    """An actor that returns facts about an array, or reads a file itself."""

    def facts(self, array: Any) -> tuple[float, bool, int]:
        """Sum, whether the array lies in a store, and bytes copied in this process."""
        return float(array.sum()), zc.in_store(array), zc.stats().bytes_copied

    def read(self, path: str) -> Any:
        """Read the file in this process."""
        return zc.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["C", "F"])
async def test_npy_of_every_dtype(tmp_path: Path, order: Any) -> None:
    path = tmp_path / "array.npy"
    for dtype in DTYPES:
        for shape in ((), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 4)):
            try:
                np.save(path, filled(shape, dtype, order))
                expected = np.load(path)
            except (TypeError, ValueError):  # NumPy itself cannot write or read some of ml_dtypes'
                continue
            assert_read(zc.load(path), expected)
    assert zc.load(path).dtype.names == ("inner", "e")  # the last dtype is among those that NumPy could write


STANDARD = st.one_of(
    nps.boolean_dtypes(),
    nps.integer_dtypes(),
    nps.unsigned_integer_dtypes(),
    nps.floating_dtypes(),
    nps.complex_number_dtypes(),
    nps.datetime64_dtypes(),
    nps.timedelta64_dtypes(),
    nps.byte_string_dtypes(max_len=5),
    nps.unicode_string_dtypes(max_len=5),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Stored array in format")  # field names may need version 3.0
async def test_any_array_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path, before = tmp_path / "array.npy", zc.stats().store_used

    @given(
        array=nps.arrays(
            st.one_of(STANDARD, nps.array_dtypes(STANDARD, max_size=3)),
            nps.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
        ),
        order=st.sampled_from("CF"),
        npz=st.sampled_from([None, np.savez, np.savez_compressed]),
    )
    @settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(array: np.ndarray[Any, Any], order: Any, npz: Callable[..., None] | None) -> None:
        array = np.asarray(array, order=order)
        if npz is None:
            np.save(path, array)
            got = zc.load(path)
        else:
            with path.open("wb") as file:
                npz(file, array, second=array)
            arrays = zc.load(path)
            assert set(arrays) == {"arr_0", "second"}
            got = arrays["arr_0"]
            assert arrays["second"].tobytes("A") == got.tobytes("A")
            assert not np.shares_memory(arrays["second"], got)
        assert got.dtype == array.dtype
        assert got.shape == array.shape
        assert got.flags.f_contiguous == array.flags.f_contiguous
        assert got.flags.c_contiguous == array.flags.c_contiguous
        assert got.tobytes("A") == array.tobytes("A")
        assert zc.in_store(got)
        assert got.flags.writeable

    check()
    assert zc.stats().store_used == before


@pytest.mark.slow
async def test_arrays_of_several_chunks(tmp_path: Path) -> None:
    array = np.random.default_rng(1).integers(0, 255, (3, 7 * MIB), "u1")
    np.save(tmp_path / "c", array)
    np.save(tmp_path / "f", array.T)
    np.savez(tmp_path / "stored", a=array, b=array.T)
    np.savez_compressed(tmp_path / "deflated", a=array, b=array.T)
    assert_read(zc.load(tmp_path / "c.npy"), array)
    assert_read(zc.load(tmp_path / "f.npy"), array.T)
    for name in ("stored", "deflated"):
        arrays = zc.load(tmp_path / f"{name}.npz")
        assert_read(arrays["a"], array)
        assert_read(arrays["b"], array.T)


def feed(path: Path, data: bytes) -> threading.Thread:
    """Start a thread that opens the named pipe and writes to it, in pieces that are smaller than a header."""

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            try:
                for start in range(0, min(len(data), 200), 5):
                    file.write(data[start : min(start + 5, 200)])
                file.write(data[200:])
            except BrokenPipeError:  # the reader has seen enough
                pass

    os.mkfifo(path)
    thread = threading.Thread(target=write)
    thread.start()
    return thread


async def test_pipes(tmp_path: Path) -> None:
    array = np.arange(300_000.0).reshape(500, 600)
    thread = feed(tmp_path / "good", saved(array))
    assert_read(zc.load(tmp_path / "good"), array)
    thread.join()
    thread = feed(tmp_path / "short", saved(array)[:-1])
    refused(ValueError, r"2,400,000 bytes of elements were expected and 2,399,999 found", tmp_path / "short")
    thread.join()
    for name, data, arguments in (("zip", archive({"a.npy": saved(1)}), {}), ("raw", bytes(80), {"dtype": "u1"})):
        thread = feed(tmp_path / name, data)
        refused(ValueError, "no regular file", tmp_path / name, **arguments)
        thread.join()


@pytest.mark.slow
async def test_nothing_is_copied(tmp_path: Path) -> None:
    array = np.arange(1e6)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "b.npz", array=array.reshape(1000, 1000).T)
    array.tofile(tmp_path / "c")
    reader: Any = await Reader.spawn()
    for loaded in (
        zc.load(tmp_path / "a.npy"),
        zc.load(tmp_path / "b.npz")["array"],
        zc.load(tmp_path / "c", dtype="f8"),
    ):
        assert zc.stats().bytes_copied == 0
        assert await reader.facts(loaded) == (array.sum(), True, 0)
        assert zc.stats().bytes_copied == 0


@pytest.mark.slow
async def test_from_threads_and_in_actors(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    array = np.arange(100_000)
    np.save(path, array)
    assert_read(await asyncio.to_thread(zc.load, path), array)
    reader: Any = await Reader.spawn()
    got = await reader.read(str(path))
    assert zc.in_store(got)
    np.testing.assert_array_equal(got, array, strict=True)


async def test_neither_of_them(tmp_path: Path) -> None:
    path = tmp_path / "picture.npy"
    for data in (b"GIF89a", b"", b"\x93NUMP", b"PK\x01\x02...."):
        path.write_bytes(data)
        refused(ValueError, f"neither .* begins with {re.escape(repr(data[:6]))}.* pass dtype=", path)
        refused(ValueError, "pass dtype=", path, shape=3)


async def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "objects"
    for array in (np.array([print, None]), np.zeros(2, [("a", "O"), ("b", "i4")])):
        path.write_bytes(saved(array))
        refused(TypeError, "unpickled", path)
        path.write_bytes(archive({"good.npy": saved(np.ones(3)), "bad.npy": saved(array)}))
        refused(TypeError, r"member 'bad\.npy'.*unpickled", path)
    path.write_bytes(bytes(64))
    for dtype in (object, [("a", object)], np.dtypes.StringDType()):
        refused(TypeError, "plain bytes", path, dtype=dtype)


async def test_arguments_of_wrong_types(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(48))
    cases: list[dict[str, Any]] = [
        {"dtype": "no such"}, {"dtype": "u1", "shape": 1.5}, {"dtype": "u1", "shape": (2, 1.5)}, {"offset": 1.0},
        {"dtype": "u1", "progress": 1}, {"dtype": "u1", "progress": "yes"},
    ]  # fmt: skip
    for arguments in cases:
        with pytest.raises(TypeError):
            zc.load(path, **arguments)
    bad: Any = 3
    with pytest.raises(TypeError, match="int"):  # a descriptor's number would be closed
        zc.load(bad)
    assert zc.stats().store_used == 0


async def test_only_raw_files_are_described(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data, kind in ((saved(np.ones(3)), "an .npy"), (archive({"a.npy": saved(1)}), "an .npz")):
        path.write_bytes(data)
        for arguments in ({"dtype": "f8"}, {"shape": 3}, {"offset": 8}):
            refused(ValueError, f"is {kind}.*raw files", path, **arguments)


async def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        zc.load(tmp_path / "missing.npy")
    with pytest.raises(IsADirectoryError):
        zc.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        zc.load(tmp_path / "missing", dtype="u1", shape=3)
    assert zc.stats().store_used == 0


@pytest.mark.slow
async def test_any_damage_is_told(tmp_path: Path) -> None:
    path, before = tmp_path / "file", zc.stats().store_used
    arrays = {"a": np.arange(20.0), "b": np.ones((2, 3), "i2").T}
    stored, deflated = io.BytesIO(), io.BytesIO()
    np.savez(stored, **arrays)  # type: ignore[arg-type]
    np.savez_compressed(deflated, **arrays)  # type: ignore[arg-type]

    @given(
        data=st.sampled_from([saved(arrays["a"]), stored.getvalue(), deflated.getvalue()]),
        where=st.floats(0, 1, exclude_max=True),
        value=st.one_of(st.none(), st.integers(0, 255)),
    )
    @settings(max_examples=400, deadline=None)
    def check(data: bytes, where: float, value: int | None) -> None:
        at = int(where * len(data))
        path.write_bytes(data[:at] if value is None else data[:at] + bytes([value]) + data[at + 1 :])
        is_npz = not data.startswith(MAGIC)
        try:
            got = zc.load(path)
        except (ValueError, TypeError) as error:
            told = str(error), zc.stats().store_used
            assert str(path) in told[0] and told[1] == before
        else:
            if is_npz:  # checksums leave only the members' names and dates to be changed
                for array, expected in zip(got.values(), arrays.values(), strict=True):
                    assert_same(array, expected)
            else:
                assert zc.in_store(got)
                assert got.nbytes <= 160

    check()


async def test_without_a_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", np.ones(3))
    with monkeypatch.context() as patch:
        patch.setattr(context, "_process", None)
        for name in ("a.npy", "missing"):
            with pytest.raises(zc.NotInitialized):
                zc.load(tmp_path / name)
