"""An attacker on the cable between two hosts: passes packets on and changes some. Parses TCP, and none of its payload.

The program runs in a namespace with two cards, ``left`` and ``right``, and takes commands as
`tests.hosts.netns.Program` gives them. It knows the bytes of the value to attack, and finds them on the wire.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
from collections import defaultdict
from typing import Any

import numpy as np

ETH_P_ALL = 3
PACKET_OUTGOING = 4
TCP = 6
SMALL = 64
"""Bytes: a payload of at most that size is one short message."""

RECORDED = 1 << 16
"""Bytes recorded of the beginning of each direction of a connection."""

Flow = tuple[bytes, bytes]
"""Addresses and ports: source, then destination."""


def checksum(data: bytes) -> int:
    """The checksum of the Internet protocols (RFC 1071)."""
    total = int(np.frombuffer(data + bytes(len(data) % 2), ">u2").sum(dtype=np.uint64))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class Between:
    """The rules by which packets are changed, shared by the threads of both directions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marker = b""
        self._bit = 0
        self._replaying = False
        self._asked: defaultdict[Flow, list[bytes]] = defaultdict(list)
        self._carried: set[Flow] = set()
        self._recorded: defaultdict[Flow, bytearray] = defaultdict(bytearray)
        self.seen = 0
        """Packets with the marker in them."""
        self.changed = 0
        """Packets that were changed on the way."""

    def watch(self, marker: bytes, *, bit: int | None, replay: bool) -> None:
        """Reset all counts and records, and look for `marker`.

        Either flip one bit of it when it is first seen, or replay a request: the first request on a socket that has
        carried the marker takes the place of a later one.
        """
        with self._lock:
            self._marker, self._bit, self._replaying = marker, -1 if bit is None else bit, replay
            self._asked.clear()
            self._carried.clear()
            self.seen = self.changed = 0

    def streams(self) -> list[bytes]:
        """The recorded requests, from the beginning, of each socket that carried the marker in the other direction."""
        with self._lock:
            return [bytes(self._recorded[to, source]) for source, to in self._carried]

    def passed(self, packet: bytearray) -> bytearray:
        """The Ethernet frame to send on in the place of `packet`."""
        if len(packet) < 54 or packet[12:14] != b"\x08\x00" or packet[23] != TCP:
            return packet
        head = 14 + 4 * (packet[14] & 15)
        end = 14 + int.from_bytes(packet[16:18], "big")
        start = head + 4 * (packet[head + 12] >> 4)
        with self._lock:
            self._look(packet, head, start, end)
        packet[head + 16 : head + 18] = bytes(2)  # a card would fill the checksum in later: the packet has none yet
        pseudo = bytes(packet[26:34]) + struct.pack(">HH", TCP, end - head)
        packet[head + 16 : head + 18] = checksum(pseudo + bytes(packet[head:end])).to_bytes(2, "big")
        return packet

    def _look(self, packet: bytearray, head: int, start: int, end: int) -> None:
        source = bytes(packet[26:30] + packet[head : head + 2])
        to = bytes(packet[30:34] + packet[head + 2 : head + 4])
        payload = bytes(packet[start:end])
        if len(self._recorded[source, to]) < RECORDED:
            self._recorded[source, to] += payload
        if not payload or not self._marker:
            return
        at = payload.find(self._marker)
        if at >= 0:
            self.seen += 1
            self._carried.add((source, to))
            if self._bit >= 0 and self.changed == 0:
                self.changed = 1
                packet[start + at + self._bit // 8] ^= 1 << self._bit % 8
        elif self._replaying and len(payload) <= SMALL:
            before = self._asked[source, to]
            same = [one for one in before if len(one) == len(payload) and one != payload]
            if same and (to, source) in self._carried and self.changed == 0:
                self.changed = 1
                packet[start:end] = same[0]
            before.append(payload)


def carry(between: Between, source: str, target: str) -> None:
    """Pass packets of one card on to the other, for ever."""
    incoming, outgoing = (socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) for _ in range(2))
    incoming.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)  # SO_RCVBUFFORCE: no packet is lost for want of room
    incoming.bind((source, ETH_P_ALL))
    outgoing.bind((target, 0))
    while True:
        data, (_, _, kind, *_) = incoming.recvfrom(1 << 16)
        if kind != PACKET_OUTGOING:
            outgoing.send(between.passed(bytearray(data)))


def main() -> None:
    """Take commands until the input ends."""
    between = Between()
    for cards in (("left", "right"), ("right", "left")):
        threading.Thread(target=carry, args=(between, *cards), daemon=True).start()
    for line in sys.stdin:
        given: dict[str, Any] = json.loads(line)
        value: Any = None
        if given["do"] == "watch":
            between.watch(bytes.fromhex(given["marker"]), bit=given.get("bit"), replay=given.get("replay", False))
        elif given["do"] == "told":
            value = [between.seen, between.changed]
        elif given["do"] == "streams":
            value = [stream.hex() for stream in between.streams()]
        print(json.dumps({"id": given["id"], "value": value}), flush=True)


if __name__ == "__main__":
    main()
