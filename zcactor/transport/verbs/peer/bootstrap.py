"""The messages of two processes over TCP, before and beside their queue pairs, and the agreement on limits.

A message is its length (u32) and MessagePack. The peer has proved that it holds the cluster's token, but its messages
are checked nevertheless: each field has a type and a range. The smaller one of two limits holds, because unequal MTUs
lose messages, and more outstanding READs than the responder serves fail.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from zcactor.errors import ProtocolError
from zcactor.transport.verbs.driver.codes import PARTITION
from zcactor.transport.verbs.peer.tagging import REACH_NBYTES, tags_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BROUGHT_NBYTES",
    "MAX_KEYS",
    "MAX_MESSAGE",
    "MAX_PORTS",
    "MAX_REASON",
    "Agreement",
    "Ask",
    "Bring",
    "Brought",
    "Exported",
    "Message",
    "Offer",
    "PathVerdict",
    "PortName",
    "Ports",
    "QpName",
    "Rebuild",
    "Rebuilt",
    "Resume",
    "Tag",
    "Tagged",
    "agree",
    "decode",
    "encode",
    "split",
    "unlike",
]

BROUGHT_NBYTES: Final = 32768
"""The most bytes of an object in one message."""
MAX_MESSAGE: Final = 4096 + BROUGHT_NBYTES
"""Bytes: those of an object, and ten times the longest of the other messages."""

_U16 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_U24 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
_U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_U64 = Annotated[int, msgspec.Meta(ge=0)]  # msgspec limits constants to 63 bits; `_check` checks the rest
_Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
MAX_PORTS: Final = 32
"""The most ports in one message: four times the cards of a large host."""
MAX_REASON: Final = 1000
"""The most characters of a reason."""
MAX_KEYS: Final = 128
"""The most keys in one message, of which they take a third."""
_Text = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]


class QpName(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The name of a queue pair."""

    qpn: _U24
    psn: _U24


class PortName(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The name of a port."""

    device: _Text
    gid: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """Zeros where the LID is the address."""
    is_global: bool
    partition: _U16


class Ports(msgspec.Struct, frozen=True, tag="ports", forbid_unknown_fields=True):
    """The ports of one end that can use RDMA, the preferred one first."""

    names: Annotated[tuple[PortName, ...], msgspec.Meta(min_length=1, max_length=MAX_PORTS)]


class Offer(msgspec.Struct, frozen=True, tag="offer", forbid_unknown_fields=True):
    """The abilities of one end through one port."""

    device: _Text
    gid: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """Zeros where the LID is the address."""
    is_global: bool
    lid: _U16
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]
    max_msg_sz: _Positive
    reads_out: _Positive
    """READs that it can have outstanding on one queue pair."""
    reads_in: _Positive
    """READs that it can serve at a time on one queue pair."""
    control: QpName
    bulk: QpName
    depth: Annotated[int, msgspec.Meta(ge=4, le=4096)]
    """Messages that it has receives for."""
    slot_nbytes: Annotated[int, msgspec.Meta(ge=256, le=1 << 21)]
    """Bytes of each receive."""
    arena_address: _U64
    seals: tuple[_U64, _U32, _U32]
    """Address, rkey and entries of its table of seals."""
    proof: tuple[_U64, _U32, _U32, _U32]
    """Address, rkey, bytes and CRC-32 of the memory that proves the path."""
    eager_limit: Annotated[int, msgspec.Meta(ge=64, le=1 << 20)]
    partition: _U16
    """The key of its partition, in which the upper bit says that it is a full member."""


class PathVerdict(msgspec.Struct, frozen=True, tag="verdict", forbid_unknown_fields=True):
    """The result of a step. The reason is empty where it has succeeded."""

    reason: _Text = ""


class Ask(msgspec.Struct, frozen=True, tag="ask", forbid_unknown_fields=True):
    """A question for the rkeys of an object. `Exported` is the answer."""

    number: _U32
    object_id: _U64
    offset: _U64
    nbytes: _U64


class Exported(msgspec.Struct, frozen=True, tag="exported", forbid_unknown_fields=True):
    """The keys and the seal of an object, or the reason against them."""

    number: _U32
    keys: Annotated[tuple[tuple[_Positive, _U32], ...], msgspec.Meta(max_length=MAX_KEYS)] = ()
    """Numbers of bytes, from the first one on, each with the rkey of these bytes. Those of a large object may not cover
    it: the reader asks for the rest."""
    seal: _U16 = 0
    reason: _Text = ""
    refused: bool = False
    """Whether the owner has the object, but cannot register its memory."""


class Bring(msgspec.Struct, frozen=True, tag="bring", forbid_unknown_fields=True):
    """A question for bytes of an object whose owner cannot register its memory. `Brought` is the answer."""

    number: _U32
    object_id: _U64
    offset: _U64
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=BROUGHT_NBYTES)]


class Brought(msgspec.Struct, frozen=True, tag="brought", forbid_unknown_fields=True):
    """The bytes of an object, or the reason against them."""

    number: _U32
    data: Annotated[bytes, msgspec.Meta(max_length=BROUGHT_NBYTES)] = b""
    reason: _Text = ""


class Tag(msgspec.Struct, frozen=True, tag="tag", forbid_unknown_fields=True):
    """A question for the tags of bytes that the reader has read. `Tagged` is the answer."""

    number: _U32
    object_id: _U64
    offset: _U64
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=REACH_NBYTES)]


class Tagged(msgspec.Struct, frozen=True, tag="tagged", forbid_unknown_fields=True):
    """Tags (`zcactor.transport.verbs.peer.tagging`), and the count of the first one; or the reason against them."""

    number: _U32
    first: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    tags: Annotated[bytes, msgspec.Meta(max_length=tags_nbytes(REACH_NBYTES))] = b""
    reason: _Text = ""


class Rebuild(msgspec.Struct, frozen=True, tag="rebuild", forbid_unknown_fields=True):
    """A request to connect the bulk queue pairs anew. `psn` is the sender's new number. The end that accepted the
    connection only asks for it, because the other end leads."""

    generation: _U32
    """The generation of the new pair. A message of another than the next generation is out of date."""
    psn: _U24


class Rebuilt(msgspec.Struct, frozen=True, tag="rebuilt", forbid_unknown_fields=True):
    """The message that the sender has drained and connected its queue pair, with this psn of its own."""

    generation: _U32
    psn: _U24


class Resume(msgspec.Struct, frozen=True, tag="resume", forbid_unknown_fields=True):
    """The message that both ends are connected, so that the receiver may post."""

    generation: _U32


Message = Ports | Offer | PathVerdict | Ask | Exported | Bring | Brought | Tag | Tagged | Rebuild | Rebuilt | Resume

_LENGTH: Final = struct.Struct("<I")
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Encode a message with its length."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes | bytearray | memoryview) -> Message:
    """Decode a message, which comes without its length.

    Raises:
        ProtocolError: `body` is no message.
    """
    try:
        message: Message = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # the second for text that is no UTF-8
        raise ProtocolError(f"the peer sent a message about RDMA that makes no sense: {error}") from error
    known: dict[type[Any], Callable[[Any], tuple[int, ...]]] = {
        Offer: lambda m: (m.arena_address, m.seals[0], m.proof[0]),
        Ask: lambda m: (m.object_id, m.offset, m.nbytes),
        Bring: lambda m: (m.object_id, m.offset),
        Tag: lambda m: (m.object_id, m.offset),
    }
    addresses = known.get(type(message))
    if addresses is not None and max(addresses(message)) >= 1 << 64:
        raise ProtocolError("the peer sent a message about RDMA with a number above 64 bits")
    return message


def split(buffer: bytearray) -> list[Message]:
    """Take all whole messages from the start of `buffer`.

    Raises:
        ProtocolError: a message is too long, or malformed.
    """
    found: list[Message] = []
    at = 0
    while len(buffer) - at >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer, at)
        if length > MAX_MESSAGE:
            raise ProtocolError(f"the peer announced a message of {length} bytes about RDMA; {MAX_MESSAGE} are allowed")
        if len(buffer) - at - _LENGTH.size < length:
            break
        at += _LENGTH.size
        found.append(decode(memoryview(buffer)[at : at + length]))
        at += length
    del buffer[:at]
    return found


class Agreement(msgspec.Struct, frozen=True):
    """The limits that both ends use."""

    mtu: int
    max_msg_sz: int
    reads_out: int
    """READs that this end may have outstanding."""
    reads_in: int
    """READs that this end serves at a time."""
    depth: int
    slot_nbytes: int
    eager_limit: int


def unlike(ours: Offer | PortName, theirs: Offer | PortName) -> str:
    """Return the reason why two ports cannot reach each other; empty where they may."""
    if ours.is_global != theirs.is_global:
        how = {True: "a GID (Ethernet)", False: "a LID (InfiniBand)"}
        return (
            f"{ours.device} here has {how[ours.is_global]} and the peer's {theirs.device} {how[theirs.is_global]}: "
            "they are on different fabrics"
        )
    if (ours.partition ^ theirs.partition) & PARTITION:
        return (
            f"{ours.device} here uses partition key {ours.partition:#06x} and the peer's {theirs.device} "
            f"{theirs.partition:#06x}, which are of two partitions: set verbs='pkey_index=...' at both"
        )
    return ""


def agree(ours: Offer, theirs: Offer) -> Agreement:
    """Agree on the smaller one of each limit.

    Raises:
        ProtocolError: one end addresses the other by GID, and the other end by LID; or they are of two partitions.
    """
    if reason := unlike(ours, theirs):
        raise ProtocolError(reason)
    return Agreement(
        mtu=min(ours.mtu, theirs.mtu),
        max_msg_sz=min(ours.max_msg_sz, theirs.max_msg_sz),
        reads_out=min(ours.reads_out, theirs.reads_in),
        reads_in=min(ours.reads_in, theirs.reads_out),
        depth=min(ours.depth, theirs.depth),
        slot_nbytes=min(ours.slot_nbytes, theirs.slot_nbytes),
        eager_limit=min(ours.eager_limit, theirs.eager_limit),
    )
