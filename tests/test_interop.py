"""Other libraries' objects over memory of the store, or with arrays in them: by reference where that is possible."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.marshal.wire import Wire, address
from zcactor.marshal.sharing import PIECE

COUNT = 50_000


def library(name: str) -> ModuleType:
    """Import the module, or skip the test with the name of the missing package."""
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install {name}")  # type: ignore[no-any-return]


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Two marshallers and the wire between them."""
    made = Wire()
    yield made
    made.close()


def stored(wire: Wire, shape: Any, dtype: Any = "f8") -> Any:
    """An array in the sender's store: 0, 1, 2, ..."""
    array = wire.left.store.empty(shape, dtype)
    array[...] = np.arange(array.size).reshape(array.shape)
    return array


@zc.actor
class User:
    """An actor that uses its arguments."""

    def __init__(self) -> None:
        self.kept: Any = None

    def tensor(self, tensor: Any) -> tuple[float, float, int]:
        """Sum, first element after a write to it, and bytes copied in this process."""
        total = float(tensor.sum())
        tensor[0] = -1
        self.kept = tensor
        return total, float(tensor[0]), zc.stats().bytes_copied

    def column(self, frame: Any, name: str) -> tuple[float, bool, int]:
        """Sum of a column, whether the column is writable, and bytes copied in this process."""
        values = frame[name].to_numpy()
        return float(values.sum()), values.flags.writeable, zc.stats().bytes_copied

    def length(self, value: Any) -> tuple[int, int]:
        """Length, and bytes copied in this process."""
        return len(value), zc.stats().bytes_copied

    def echo(self, value: Any) -> Any:
        """Return the value."""
        return value


async def spawned() -> Any:
    """Spawn the actor; its handle is untyped."""
    return await zc.spawn(User)


class TestPandas:
    @pytest.mark.slow
    def test_frame_over_the_store_is_not_copied(self, wire: Wire) -> None:
        pandas = library("pandas")
        array = stored(wire, (3, COUNT))
        frame = pandas.DataFrame(array.T, columns=list("abc"), copy=False)
        wire.send(array)  # whole: it is closed
        got = wire.send({"frame": frame})["frame"]
        pandas.testing.assert_frame_equal(got, frame)
        assert got.to_numpy().ctypes.data == address(array)
        assert "argument outside the store" not in wire.left.copies.snapshot()
        with pytest.raises(ValueError, match="read-only"):
            got.to_numpy()[0] = 1

    @pytest.mark.slow
    def test_series_over_the_store_is_not_copied(self, wire: Wire) -> None:
        pandas = library("pandas")
        array = stored(wire, COUNT)
        series = pandas.Series(array, copy=False, name="s")
        got = wire.send([series])[0]
        pandas.testing.assert_series_equal(got, series)
        assert got.to_numpy().ctypes.data == address(array)
        assert "argument outside the store" not in wire.left.copies.snapshot()

    @pytest.mark.parametrize(
        "make",
        [
            lambda pd: pd.Series(pd.date_range("2026", periods=3000, tz="UTC")),
            lambda pd: pd.Series(pd.Categorical(["a", "b"] * 2000)),
            lambda pd: pd.Series([1, None] * 2000, dtype="Int64"),
            lambda pd: pd.Series(["a", "b", None] * 2000, dtype="string"),
            lambda pd: pd.Series(pd.arrays.SparseArray([0, 1] * 2000)),
            lambda pd: pd.Series([1, "a", None]),
            lambda pd: pd.Series(np.arange(3000), index=pd.MultiIndex.from_product([range(30), range(100)])),
            lambda pd: pd.Series(pd.timedelta_range("1s", periods=2000)),
            lambda pd: pd.Series(pd.interval_range(0, 1000)),
        ],
    )
    def test_every_kind_of_column(self, wire: Wire, make: Any) -> None:
        pandas = library("pandas")
        series = make(pandas)
        pandas.testing.assert_series_equal(wire.send(series), series)
        frame = pandas.DataFrame({"one": series, "two": range(len(series))})
        pandas.testing.assert_frame_equal(wire.send([frame])[0], frame)

    @pytest.mark.slow
    async def test_between_processes(self) -> None:
        pandas = library("pandas")
        async with zc.init():
            user = await spawned()
            frame = pandas.DataFrame(zc.ones((2, COUNT)).T, columns=["a", "b"], copy=False)
            assert await user.column(frame, "b") == (COUNT, False, 0)
            pandas.testing.assert_frame_equal(await user.echo(frame), frame)
            assert "argument outside the store" not in zc.stats().copies


class TestArrow:
    def test_buffer_over_the_store_is_not_copied(self, wire: Wire) -> None:
        arrow = library("pyarrow")
        array = stored(wire, COUNT)
        buffer = arrow.py_buffer(array)
        assert wire.send(buffer).equals(buffer)
        assert {*wire.left.copies.snapshot()} == {PIECE} and array.flags.writeable
        wire.send(array)  # whole: it is closed
        copied = wire.left.bytes_copied
        got = wire.send(buffer)
        assert got.equals(buffer)
        assert got.address == address(array)
        assert wire.left.bytes_copied == copied and wire.right.bytes_copied == 0

    def test_arrays_and_tables(self, wire: Wire) -> None:
        arrow = library("pyarrow")
        first, second = stored(wire, COUNT), stored(wire, COUNT, "i4")
        table = arrow.table({"a": arrow.array(first), "b": arrow.array(second)})
        wire.send([first, second])
        for value in (table["a"].chunk(0), table["b"], table, table.to_batches()[0], table.slice(100, 50)):
            got = wire.send([value, {1}])[0]
            assert got.equals(value)
        got = wire.send(table)
        assert got["a"].chunk(0).buffers()[1].address == address(first)
        assert got["b"].chunk(0).buffers()[1].address == address(second)
        assert "argument outside the store" not in wire.left.copies.snapshot()
        assert got.slice(5)["a"][0].as_py() == 5

    def test_outside_the_store_is_copied_once_per_buffer(self, wire: Wire) -> None:
        arrow = library("pyarrow")
        values = arrow.array(["text %d" % index for index in range(5000)] + [None])  # noqa: UP031
        assert wire.send(values).equals(values)
        sizes = [buffer.size for buffer in values.buffers()]
        assert wire.left.copies.snapshot()["argument outside the store"].nbytes == sum(sizes)

    @pytest.mark.slow
    async def test_between_processes(self) -> None:
        arrow = library("pyarrow")
        async with zc.init():
            user = await spawned()
            values = arrow.array(zc.freeze(zc.ones(COUNT)))
            assert await user.length(values) == (COUNT, 0)
            assert (await user.echo(values)).equals(values)
            assert zc.stats().bytes_copied == 0


class TestTorch:
    @pytest.fixture
    def torch(self) -> Any:
        """The torch module, or a skip."""
        return library("torch")

    def test_strides_and_types(self, wire: Wire, torch: Any) -> None:
        tensor = torch.from_numpy(stored(wire, (100, 500), "f4"))
        for sent in (tensor, tensor[::2, 3:], tensor.T, tensor[5], tensor[0, 0], tensor.view(torch.int32)):
            got = wire.send({"t": sent, "s": {1}})["t"]
            assert torch.equal(got, sent)
            assert got.dtype == sent.dtype
        assert "argument outside the store" not in wire.left.copies.snapshot()

    @pytest.mark.parametrize(
        "name",
        [
            "bfloat16",
            "float16",
            "float8_e4m3fn",
            "float8_e5m2",
            "float64",
            "int8",
            "uint8",
            "uint16",
            "int64",
            "bool",
            "complex64",
        ],
    )
    def test_dtypes(self, wire: Wire, torch: Any, name: str) -> None:
        for count in (3, 3000):
            tensor = (torch.arange(count) % 7).to(getattr(torch, name))
            got = wire.send(tensor)
            assert got.dtype == tensor.dtype
            assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))

    def test_unusual_tensors(self, wire: Wire, torch: Any) -> None:
        for tensor in (torch.zeros(()), torch.zeros((0, 3)), torch.ones(3).expand(1000, 3), torch.ones(2)):
            got = wire.send(tensor)
            assert torch.equal(got, tensor)
            assert got.shape == tensor.shape
        assert wire.send(torch.ones(1000, requires_grad=True)).requires_grad
        parameter = wire.send(torch.nn.Parameter(torch.ones(1000)))
        assert type(parameter) is torch.nn.Parameter
        layer = torch.nn.Linear(50, 50)
        assert torch.equal(wire.send(layer)(torch.ones(50)), layer(torch.ones(50)))
        for odd in (torch.ones(1000).to_sparse(), torch.complex(torch.ones(9), torch.ones(9)).conj()):
            assert torch.equal(torch.as_tensor(wire.send(odd)).to_dense(), odd.to_dense())

    async def test_received_tensor_is_private_and_not_copied(self, torch: Any) -> None:
        async with zc.init():
            one, other = await spawned(), await spawned()
            array = zc.ones(COUNT)
            tensor = torch.from_numpy(array)
            # Torch has no read-only tensors: each receiver writes to pages of its own, and only to those it touches.
            for user in (one, other, one):
                assert await user.tensor(tensor) == (COUNT, -1, 0)
            assert float(tensor[0]) == array[0] == 1
            assert zc.stats().bytes_copied == 0
            # A part that begins in the middle of a page; its memory had another array before.
            for value in (2.0, 3.0):
                part = torch.from_numpy(zc.full(COUNT, value))[7:-5]
                assert await one.tensor(part) == (value * (COUNT - 12), -1, 0)
            # Small tensors travel within the message.
            assert await one.tensor(torch.ones(3)) == (3, -1, 0)
            # An actor may have written to its tensor: the one that comes back has memory of its own, not the sent
            # array's.
            back = await one.echo(tensor)
            assert back.data_ptr() != address(array)
            back[0] = 5
            assert array[0] == 1
            # In the owner's process a received tensor is private, too, and not copied.
            ref = zc.put(tensor)
            ours = await ref
            assert ours.data_ptr() != address(array)
            ours[0] = 6
            assert float(array[0]) == 1
            assert zc.stats().bytes_copied == 0


def test_jax() -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed: pip install jax")
    # JAX gets a process of its own: once imported, it objects to every fork, and other tests here fork.
    program = Path(__file__).parent / "marshal" / "jax_program.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
