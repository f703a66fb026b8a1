"""Files read into the store."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import re
import struct
import sys
import threading
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import zcactor as zc
from tests.marshal.dtypes import DTYPES, filled
from tests.marshal.wire import assert_same, strides
from zcactor import context

MIB = 1 << 20
MAGIC = b"\x93NUMPY"


CAPACITY = 512 * MIB
"""Bytes of the store."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Node]:
    async with zc.init(store_capacity=CAPACITY, log_to_driver=False) as node:
        yield node


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def _empty_store(node: zc.Node) -> AsyncIterator[None]:
    """After each test the store is empty again, whatever was raised, and nothing was copied."""
    yield
    async with asyncio.timeout(20):
        while zc.stats().store_used:
            gc.collect()
            await asyncio.sleep(0)
    assert zc.stats().bytes_copied == 0


@zc.actor
class Reader:
    """Says what it was given, or what it read itself."""

    def facts(self, array: Any) -> tuple[float, bool, int]:
        """Sum, whether it lies in some store, and bytes copied in this process."""
        return float(array.sum()), zc.in_store(array), zc.stats().bytes_copied

    def read(self, path: str) -> Any:
        """The file, read in this process."""
        return zc.load(path)


def npy(header: str | bytes, data: bytes = b"", version: tuple[int, int] = (1, 0), length: int | None = None) -> bytes:
    """An .npy with any header."""
    text = header.encode("latin1" if version < (3, 0) else "utf8") if isinstance(header, str) else header
    size = len(text) if length is None else length
    return MAGIC + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", size) + text + data


def described(shape: str, descr: str = "'<f8'", fortran: str = "False") -> str:
    """A header's text."""
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}\n"


def saved(array: Any) -> bytes:
    """An .npy as NumPy writes it."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as zipped:
        for name, data in members.items():
            zipped.writestr(name, data)
    return file.getvalue()


def refused(error: type[BaseException], match: str, path: Path, /, **arguments: Any) -> None:
    """`load` raises `error`, whose message names the file and matches, and leaves nothing in the store, although the
    error is still there."""
    before = zc.stats().store_used
    with pytest.raises(error, match=match) as caught:
        zc.load(path, **arguments)
    assert str(path) in str(caught.value)
    assert zc.stats().store_used == before


def assert_read(got: Any, expected: Any) -> None:
    """What `load` gives for an array that `numpy.load` gives as `expected`."""
    assert_same(got, expected)
    assert not got.size or strides(got) == strides(expected)
    assert got.flags.c_contiguous == expected.flags.c_contiguous
    assert got.flags.f_contiguous == expected.flags.f_contiguous
    assert got.flags.writeable
    assert got.ctypes.data % 64 == 0
    assert zc.in_store(got)


# ---- what is read


@pytest.mark.parametrize("order", ["C", "F"])
async def test_npy_of_every_dtype(tmp_path: Path, order: Any) -> None:
    path = tmp_path / "array.npy"
    for dtype in DTYPES:
        for shape in ((), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 4)):
            try:
                np.save(path, filled(shape, dtype, order))
                expected = np.load(path)
            except (TypeError, ValueError):  # some of ml_dtypes' cannot be written or read again by NumPy either
                continue
            assert_read(zc.load(path), expected)
    assert zc.load(path).dtype.names == ("inner", "e")  # the last one is among those that could be written


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
    array = np.ones(2, [(f"field {number}", "f4") for number in range(3000)])  # NumPy needs to be asked to read it
    path = tmp_path / "wide.npy"
    with path.open("wb") as file:
        np.lib.format.write_array(file, array, (2, 0))
    assert_read(zc.load(path), array)


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


async def test_raw(tmp_path: Path) -> None:
    path = tmp_path / "raw.npy"  # nor does it here
    data = np.arange(24, dtype=">i2")
    path.write_bytes(b"head" + data.tobytes())
    assert_read(zc.load(path, dtype=">i2", offset=4), data)
    assert_read(zc.load(path, dtype=">i2", offset=4, shape=24), data)
    assert_read(zc.load(path, dtype=">i2", offset=np.int64(4), shape=(4, -1)), data.reshape(4, 6))
    assert_read(zc.load(path, dtype=">i2", offset=4, shape=[-1, 3, 2]), data.reshape(4, 3, 2))
    pairs = [("a", "u1"), ("b", ">i2", (2,)), ("c", "S1")]
    assert_read(zc.load(path, dtype=pairs, offset=4), np.frombuffer(data.tobytes(), pairs))
    assert_read(zc.load(path, dtype=">i2", offset=52), np.zeros(0, ">i2"))
    assert_read(zc.load(path, dtype=">i2", offset=50, shape=()), np.array(23, ">i2"))


async def test_empty_raw_files(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert_read(zc.load(path, dtype="f4"), np.zeros(0, "f4"))
    assert_read(zc.load(path, dtype="f4", shape=(-1, 3)), np.zeros((0, 3), "f4"))
    assert_read(zc.load(path, dtype="f4", shape=(3, 0)), np.zeros((3, 0), "f4"))


async def test_what_follows_an_npy_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "two.npy"
    path.write_bytes(saved(np.arange(4)) + saved(np.ones(2)))
    assert_read(zc.load(path), np.arange(4))


def feed(path: Path, data: bytes) -> threading.Thread:
    """A thread that opens the named pipe and writes to it, in pieces that are smaller than a header."""

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            try:
                for start in range(0, min(len(data), 200), 5):
                    file.write(data[start : min(start + 5, 200)])
                file.write(data[200:])
            except BrokenPipeError:  # the reader saw enough
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


# ---- passing it on


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


async def test_from_threads_and_in_actors(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    array = np.arange(100_000)
    np.save(path, array)
    assert_read(await asyncio.to_thread(zc.load, path), array)
    reader: Any = await Reader.spawn()
    got = await reader.read(str(path))
    assert zc.in_store(got)
    np.testing.assert_array_equal(got, array, strict=True)


# ---- what is refused


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


async def test_raw_files_of_another_size(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(50))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "f8"}, "multiple of 8 bytes was expected .* 50 found"),
        ({"dtype": "f8", "offset": 3}, "multiple of 8 bytes was expected .* 47 found after offset 3"),
        ({"dtype": "u1", "shape": 51}, "51 bytes were expected .* 50 found"),
        ({"dtype": "u1", "shape": (7, 7)}, "49 bytes were expected .* 50 found"),
        ({"dtype": "u2", "shape": (5, 5), "offset": 2}, "50 bytes were expected .* 48 found after offset 2"),
        ({"dtype": "u1", "shape": (-1, 7)}, "multiple of 7 bytes was expected .* 50 found"),
        ({"dtype": "u1", "shape": (-1, -1)}, "negative"),
        ({"dtype": "u1", "shape": (-2, -1)}, "negative"),
        ({"dtype": "u1", "shape": -3}, "negative"),
        ({"dtype": "u1", "shape": (0, -1)}, "inferred"),
        ({"dtype": "S0"}, "inferred"),
        ({"dtype": "S0", "shape": 3}, "0 bytes were expected .* 50 found"),
        ({"dtype": "u1", "offset": 51}, "offset 51 is not within its 50 bytes"),
        ({"dtype": "u1", "offset": -1}, "offset -1 is not within its 50 bytes"),
        ({"dtype": "u1", "shape": (1 << 70, 0)}, "no array of that shape"),
        ({"dtype": "u1", "shape": 1 << 62}, "4,611,686,018,427,387,904 bytes were expected"),
        ({"dtype": ("u1", (2,))}, "shape of its own"),
    ]
    for arguments, match in cases:
        refused(ValueError, match, path, **arguments)


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
    hidden[hidden.index(b"PK\x01\x02") + 32] = 51  # a comment as long as what follows
    cases.append((bytes(hidden), "its directory has 2 members, 1 were found"))
    cases.append((archive({"a.npy": good}) + b"more", "does not end where the file does"))
    encrypted = bytearray(archive({"a.npy": good}))
    for at in (6, encrypted.index(b"PK\x01\x02") + 8):
        encrypted[at] |= 1
    cases.append((bytes(encrypted), "encrypted"))
    for data, match in cases:
        path.write_bytes(data)
        refused(ValueError, match, path)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
async def test_checksums(tmp_path: Path, compression: int) -> None:
    path = tmp_path / "a.npz"
    members = {"good.npy": saved(np.ones(1000)), "bad.npy": saved(np.random.default_rng(0).random(9 * MIB // 8))}
    data = bytearray(archive(members, compression))
    data[len(data) // 2] ^= 1  # amidst the elements of the second
    path.write_bytes(data)
    refused(ValueError, r"member 'bad\.npy' is damaged: ", path)
    data = bytearray(archive({"none.npy": saved(np.ones(0))}, compression))
    at = data.index(b"PK\x01\x02") + 16
    data[at] ^= 1
    path.write_bytes(data)
    refused(ValueError, "none.npy.*CRC-32", path)


async def test_archives_that_claim_too_much(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    header = npy(described("(16777216,)"))
    for compression, match in ((zipfile.ZIP_STORED, "claims 134"), (zipfile.ZIP_DEFLATED, "claims 134")):
        data = bytearray(archive({"a.npy": header}, compression))
        struct.pack_into("<I", data, data.index(b"PK\x01\x02") + 24, len(header) + (128 << 20))
        path.write_bytes(data)
        refused(ValueError, match, path)
    data = bytearray(archive({"a.npy": header}))
    for at in (20, 24):  # as many bytes, stored and compressed, as there are not
        struct.pack_into("<I", data, data.index(b"PK\x01\x02") + at, len(header) + (128 << 20))
    path.write_bytes(data)
    refused(ValueError, "would end at byte 134", path)
    data = bytearray(archive({"a.npy": saved(np.zeros(5000))}, zipfile.ZIP_DEFLATED))
    struct.pack_into("<I", data, data.index(b"PK\x01\x02") + 24, len(saved(np.zeros(5001))))
    path.write_bytes(data)
    refused(ValueError, "takes 40,000 bytes, 40,008 were found", path)


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
            if is_npz:  # checksums leave only what describes members to be changed: names, dates
                for array, expected in zip(got.values(), arrays.values(), strict=True):
                    assert_same(array, expected)
            else:
                assert zc.in_store(got)
                assert got.nbytes <= 160

    check()


# ---- files that change, stores that are full, callers that give up


def shrinking(path: Path, nbytes: int) -> Callable[[int, int], None]:
    """Cuts the file as soon as it is being read."""

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


async def test_a_store_that_is_full(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(MIB))
    np.savez(tmp_path / "b.npz", small=np.ones(1000), large=np.ones(MIB))
    np.ones(MIB).tofile(tmp_path / "c")
    np.save(tmp_path / "fits.npy", np.ones(1000))
    kept = zc.empty(CAPACITY - MIB, "u1"), zc.load(tmp_path / "fits.npy")
    used = zc.stats().store_used
    cases: list[tuple[str, dict[str, Any]]] = [("a.npy", {}), ("b.npz", {}), ("c", {"dtype": "f8"})]
    for name, arguments in cases:
        with pytest.raises(zc.OutOfMemory) as caught:
            zc.load(tmp_path / name, **arguments)
        assert caught.value.requested == 8 * MIB
        assert zc.stats().store_used == used
    assert kept[1].sum() == 1000


async def test_without_a_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", np.ones(3))
    with monkeypatch.context() as patch:
        patch.setattr(context, "_process", None)
        for name in ("a.npy", "missing"):
            with pytest.raises(zc.NotInitialized):
                zc.load(tmp_path / name)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, EOFError, OSError])
async def test_what_the_callable_raises_comes_through(tmp_path: Path, kind: type[BaseException]) -> None:
    raised = kind(22, "from the callable")
    array = np.zeros(20 * MIB, "u1")
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "b.npz", first=np.ones(10), second=array)
    np.savez_compressed(tmp_path / "c.npz", first=np.ones(10), second=array)

    before = zc.stats().store_used

    def give_up(done: int, total: int) -> None:
        if done > total // 2:
            raise raised

    for name in ("a.npy", "b.npz", "c.npz"):
        with pytest.raises(kind) as caught:
            zc.load(tmp_path / name, progress=give_up)
        assert caught.value is raised
        assert zc.stats().store_used == before


# ---- progress


class Terminal(io.StringIO):
    """Holds what is written, and says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def sparse(path: Path, nbytes: int) -> Path:
    """A file of zeros that takes no room."""
    with path.open("wb") as file:
        file.truncate(nbytes)
    return path


async def test_progress_to_a_callable(tmp_path: Path) -> None:
    array = np.zeros(20 * MIB, "u1")
    np.save(tmp_path / "a.npy", array)
    np.save(tmp_path / "empty.npy", array[:0])
    np.savez(tmp_path / "b.npz", first=array[:100], second=array)
    np.savez_compressed(tmp_path / "c.npz", first=array[:100], second=array)
    sizes = {"a.npy": 20 * MIB, "empty.npy": 0}
    sizes["b.npz"] = sizes["c.npz"] = len(saved(array)) + len(saved(array[:100]))
    for name, size in sizes.items():
        told: list[tuple[int, int]] = []
        zc.load(tmp_path / name, progress=lambda done, total, told=told: told.append((done, total)))  # type: ignore[misc]
        assert {total for _, total in told} == {size}
        steps = [done for done, _ in told]
        assert steps[0] == 0
        assert steps[-1] == size
        assert steps == sorted(steps)
        assert max(np.diff([*steps, size])) <= 16 * MIB  # it was read in chunks


@pytest.mark.slow
async def test_progress_on_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = sparse(tmp_path / "small\n", MIB), sparse(tmp_path / "large", 256 * MIB)
    shown: dict[tuple[str, bool, bool | None], bool] = {}
    for path in (small, large):
        for kind in (Terminal, io.StringIO):
            for progress in (None, True, False):
                stream = kind()
                monkeypatch.setattr(sys, "stderr", stream)
                assert zc.load(path, dtype="u1", progress=progress).nbytes == path.stat().st_size
                text = stream.getvalue()
                shown[path.name, kind is Terminal, progress] = bool(text)
                if text:
                    *lines, last = text.removeprefix("\r").split("\r")
                    name = "large" if path is large else r"'small\\n'"  # no name steers the terminal
                    for line in lines:
                        assert re.fullmatch(rf"{name}: +\d+ %  +\d+\.\d\d GB/s", line)
                    assert re.fullmatch(rf"{name}: 100 %  +\d+\.\d\d GB/s\n", last)
    assert {case for case, is_shown in shown.items() if is_shown} == {
        ("small\n", True, True), ("small\n", False, True), ("large", True, True), ("large", False, True),
        ("large", True, None),
    }  # fmt: skip
    monkeypatch.setattr(sys, "stderr", None)  # as in programs without a console
    assert zc.load(small, dtype="u1", progress=True).nbytes == MIB


async def test_the_line_ends_when_reading_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(archive({"a.npy": saved(np.ones(1000))}))
    data[500] ^= 1
    (tmp_path / "a.npz").write_bytes(data)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(ValueError, match="CRC-32"):
        zc.load(tmp_path / "a.npz", progress=True)
    text = stream.getvalue()
    assert text.startswith("\ra.npz: ")
    assert text.endswith("GB/s\n")
