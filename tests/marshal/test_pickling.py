"""Pickled values: classes by name or by value, arrays and buffers out of band."""

from __future__ import annotations

import contextlib
import enum
import gc
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.marshal.modules import load
from tests.marshal.wire import Wire, address
from zcactor.marshal import move, pickling
from zcactor.marshal.move import is_moved

pytestmark = pytest.mark.usefixtures("restored_imports")

SOURCE = """
import dataclasses, enum
CALLS = []
class Error(Exception):
    def note(self):
        CALLS.append(self)
class Colour(enum.Enum):
    RED = 1
@dataclasses.dataclass
class Holder:
    array: object
def work(x):
    return Holder(x)
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    """A module that only this process has."""
    return load("only_here", tmp_path / "only_here.py", SOURCE)


def test_class_that_went_by_value_is_itself_when_it_comes_back(wire: Wire, module: ModuleType) -> None:
    for _ in range(2):
        there = wire.send([module.Error("x"), module.Colour.RED, {1}])
        error, colour, _ = wire.send(there, back=True)
        assert type(error) is module.Error
        assert error.args == ("x",)
        assert colour is module.Colour.RED
    # The class's methods still work on the module's own globals: they were not replaced by copies.
    error.note()
    assert [error] == module.CALLS
    assert module.Error.note.__globals__ is module.__dict__


def test_code_that_goes_by_value_keeps_the_name_of_its_file(wire: Wire) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def outer():\n    return (lambda: 1)\n", "cell.py", "exec"), namespace)
    there = wire.send(namespace["outer"])
    assert there is not namespace["outer"]
    assert there.__code__.co_filename == there().__code__.co_filename == "cell.py"


@pytest.mark.slow
def test_by_value_in_a_process_that_lacks_the_module(wire: Wire, module: ModuleType, tmp_path: Path) -> None:
    payload, parts, _ = wire.left.marshaller.pack([module.work, module.Holder(3), module.Colour, module.Error("e")])
    if parts:
        payload = bytes(np.asarray(parts[0].holder))[: parts[0].nbytes]
    (tmp_path / "payload").write_bytes(payload)
    program = f"""
import sys
from tests.marshal.wire import Wire
wire = Wire()
assert "only_here" not in sys.modules
work, holder, colour, error = wire.right.marshaller.unpack(open({str(tmp_path / "payload")!r}, "rb").read(), (), 0)
assert type(work(1)) is type(holder) and holder.array == 3 and colour.RED.value == 1
again, same = wire.send([work, holder]), wire.send([holder, {{1}}])
assert type(same[0]) is type(holder)
error.note()
payload, parts, flags = wire.left.marshaller.pack([error, holder, {{1}}])
if parts:
    import numpy as np
    payload = bytes(np.asarray(parts[0].holder))[: parts[0].nbytes]
open({str(tmp_path / "answer")!r}, "wb").write(payload)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    error, holder, _ = wire.right.marshaller.unpack((tmp_path / "answer").read_bytes(), (), 0)
    assert type(error) is module.Error
    assert type(holder) is module.Holder
    assert module.Error.note.__globals__ is module.__dict__


def test_class_made_in_a_function(wire: Wire) -> None:
    class Local:
        def __init__(self) -> None:
            self.array = np.arange(1000)

    got = wire.send(Local())
    assert type(got) is Local
    assert got.array.tolist() == list(range(1000))

    class Shade(enum.IntEnum):
        DARK = 1

    assert wire.send([Shade.DARK, {2}])[0] is Shade.DARK


def test_class_that_came_before_is_not_made_again(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = []
    read = pickling._loads

    def loads(unpacking: Any, stream: Any, buffers: list[bytes]) -> Any:
        streams.append(stream)
        return read(unpacking, stream, buffers)

    monkeypatch.setattr(pickling, "_loads", loads)
    monkeypatch.setattr(pickling, "_classes", {})

    class Local:
        def one(self) -> int:
            return 1

    assert wire.send(Local) is Local
    assert wire.send(Local) is Local
    assert len(streams) == 1
    Local.two = lambda self: 2  # type: ignore[attr-defined]
    assert wire.send(Local) is Local
    assert len(streams) == 2
    for _ in range(2):
        assert wire.send(enum.IntEnum) is enum.IntEnum  # by name: another import costs little, and may differ
    assert len(streams) == 4

    for number in range(2 * pickling.CLASSES):
        wire.send(type(f"Other{number}", (), {}))
    assert 0 < len(pickling._classes) <= pickling.CLASSES
    large = type("Large", (), {"text": "x" * pickling.CLASS_NBYTES})
    before = len(pickling._classes)
    assert wire.send(large) is large
    assert len(pickling._classes) == before


@pytest.mark.slow
def test_class_that_is_gone_is_not_given(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling, "_classes", {})
    wire.send(type("Gone", (), {}))
    (found,) = pickling._classes.values()
    gc.collect()
    assert found() is None
    gone = wire.send(type("Gone", (), {}))
    assert gone.__name__ == "Gone"


def test_lambda_and_closure(wire: Wire) -> None:
    array = wire.left.store.empty(1000)
    array.fill(3)
    function = wire.send(lambda k: k * array)
    assert function(2)[0] == 6
    assert address(function.__closure__[0].cell_contents) == address(array)
    assert wire.left.bytes_copied == wire.left.copies.snapshot().get("payload above the eager limit", _NONE).nbytes


class _NONE:
    nbytes = 0


class Buffers:
    """A value that pickles its memory out of band, as Arrow does."""

    def __init__(self, *buffers: Any) -> None:
        self.buffers = buffers

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Buffers, tuple(map(pickle.PickleBuffer, self.buffers))


def test_buffers_of_other_libraries_go_out_of_band(wire: Wire) -> None:
    array = wire.left.store.empty(1000)
    array.fill(2)
    wire.send(array)
    outside = bytearray(b"x" * 4000)
    columns = np.asfortranarray(np.arange(1000.0).reshape(10, 100))
    got = wire.send(Buffers(array.data, outside, memoryview(b"small"), columns))
    assert [bytes(buffer) for buffer in got.buffers] == [
        array.tobytes(), bytes(outside), b"small", columns.T.tobytes()
    ]  # fmt: skip
    assert np.frombuffer(got.buffers[0], "u1").ctypes.data == address(array)
    copies = wire.left.copies.snapshot()
    assert copies["argument outside the store"].nbytes == 12000
    outside[0] = 0
    assert bytes(got.buffers[1]) == b"x" * 4000
    for buffer in (got.buffers[0], got.buffers[1], got.buffers[3]):
        assert memoryview(buffer).readonly


def test_move_inside_an_object(wire: Wire) -> None:
    array = wire.left.store.empty(1000)
    box: dict[Any, Any] = {1.5: [move(array)], "set": {1}}
    got = wire.send(box)
    assert is_moved(array)
    got[1.5][0][:] = 4
    with pytest.raises(ValueError, match=r"zc\.move"):
        wire.left.marshaller.pack({1.5: array})


def test_moved_array_is_not_pickled_behind_our_back(wire: Wire) -> None:
    array = np.zeros(1000)
    wire.send(move(array))
    with pytest.raises(ValueError, match=r"zc\.move"):
        pickle.dumps(array)


def test_errors_of_a_value_s_own_code_pass_through(wire: Wire) -> None:
    class Refuses:
        def __reduce__(self) -> Any:
            raise LookupError("not me")

    class Fails:
        def __setstate__(self, state: Any) -> None:
            raise LookupError("not here")

        def __getstate__(self) -> Any:
            return 1

    with pytest.raises(LookupError, match="not me"):
        wire.send([Refuses()])
    with pytest.raises(LookupError, match="not here"):
        wire.send([Fails()])
    assert wire.send({1}) == {1}


def test_pickle_within_a_pickle(wire: Wire) -> None:
    class Nested:
        """A value whose unpickling unpacks another message in between."""

        def __init__(self, wire: Wire, array: Any) -> None:
            self.array = array

        def __reduce__(self) -> Any:
            return _reopen, (self.array,)

    array = wire.left.store.empty(1000)
    array.fill(1)
    other = wire.right.store.empty(500)
    other.fill(2)
    _reopen.wire, _reopen.inner = wire, {1.5: other}  # type: ignore[attr-defined]
    got = wire.send([Nested(wire, array), array, {1}])
    assert got[0][1][1.5][0] == 2
    assert address(got[0][0]) == address(got[1]) == address(array)


def _reopen(array: Any) -> Any:
    marshaller = _reopen.wire.right.marshaller  # type: ignore[attr-defined]
    payload, parts, flags = marshaller.pack(_reopen.inner)  # type: ignore[attr-defined]
    return array, marshaller.unpack(payload, parts, flags)


class Sub(np.ndarray):
    """A subclass of the program's own."""


def fill(array: Any) -> None:
    """Write to an array of any kind."""
    array[...] = 9


def fill_field(array: Any) -> None:
    """Write to a field of a record array."""
    array.a[0] = 9


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (lambda x: x.view(Sub), fill),
        (lambda x: x[5:].view(Sub), fill),
        (lambda x: x.view([("a", "f8")]).view(np.recarray), fill_field),
        (lambda x: np.rec.array(x.view([("a", "f8")])), fill_field),
        (np.ma.masked_array, fill),
        (lambda x: np.ma.masked_array(x, mask=x > 1), fill),
        (lambda x: np.ma.masked_array(x, mask=x > 1), lambda x: x.__setitem__(0, np.ma.masked)),
        (lambda x: x.reshape(10, -1).T.view(Sub), fill),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_view_of_a_subclass_is_a_snapshot(wire: Wire, make: Any, write: Any, inside: bool) -> None:
    """Other views of it may exist, which hold it as a name does."""
    plain: Any = wire.left.store.empty(10_000) if inside else np.empty(10_000)
    plain.fill(1)
    array = make(plain)
    got = wire.send(array)
    assert type(got) is type(array)
    before = got.tolist()
    with contextlib.suppress(ValueError):  # the mask of a masked array was passed whole
        write(array)
    plain.fill(8)
    assert got.tolist() == before


def test_subclass_that_is_copied_stays_writable(wire: Wire) -> None:
    """Values within the payload need no protection of their own, and neither does what is a view of other memory."""
    small = np.zeros(8).view(Sub)
    masked: Any = np.ma.masked_array(np.zeros(100), mask=[True] * 100)
    wire.send([small, masked])
    small[0] = 1
    masked.mask[0] = False
    masked[0] = 1


def test_memory_mapped_file_is_copied_each_time(wire: Wire, tmp_path: Path) -> None:
    """Such an array also stays writable for the caller."""
    mapped = np.memmap(tmp_path / "file", "f8", "w+", shape=(1000,))
    for value in (1, 2):
        mapped[:] = value
        got = wire.send(mapped)
        assert got.tolist() == [value] * 1000
        mapped[:] = 7
        assert got.tolist() == [value] * 1000
    assert wire.left.copies.snapshot()["argument outside the store"].count == 2
