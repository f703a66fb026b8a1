"""A cable that loses packets: frames pass between two network cards, and some of one direction are lost.

``python -m tests.hosts.lossy FROM TO PERCENT regular|random`` passes frames from the card FROM to the card TO without
some of the IPv4 packets, and all frames back. It prints ``ready``, and ends when its input ends. Random losses are the
same in each run.

Frames are read and written with the header that tells of checksums and segments left to a card (``PACKET_VNET_HDR``,
packet(7)): virtual cables carry packets without either.
"""

from __future__ import annotations

import random
import selectors
import socket
import sys
from typing import Final

_SOL_PACKET: Final = 263
_PACKET_VNET_HDR: Final = 15
_PACKET_IGNORE_OUTGOING: Final = 23
_ETH_P_ALL: Final = 3
_HEADER: Final = 10
"""Bytes of ``struct virtio_net_hdr``, which comes before the frame."""
_KIND: Final = slice(_HEADER + 12, _HEADER + 14)
_IPV4: Final = b"\x08\x00"
_LARGEST: Final = 1 << 17
SEED: Final = 7


class Lot:
    """The choice of packets to lose.

    Args:
        percent: the share of lost packets, in percent.
        regular: lose every n-th packet, instead of packets by chance.
    """

    def __init__(self, percent: float, *, regular: bool) -> None:
        self._each = round(100 / percent)
        self._regular = regular
        self._count = 0
        self._chance = random.Random(SEED)

    def falls_on(self, frame: bytes) -> bool:
        """Whether this frame is lost."""
        if frame[_KIND] != _IPV4:
            return False
        self._count += 1
        return self._count % self._each == 0 if self._regular else self._chance.randrange(self._each) == 0


def open_card(name: str) -> socket.socket:
    """A socket with all incoming frames of a card, which also sends there."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    sock.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    sock.bind((name, _ETH_P_ALL))
    sock.setblocking(False)
    return sock


def main(source: str, target: str, percent: str, how: str) -> None:
    """Pass frames on until the input ends."""
    lot = Lot(float(percent), regular=how == "regular")
    near, far = open_card(source), open_card(target)
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(near, selectors.EVENT_READ, (near, far, lot))
        selector.register(far, selectors.EVENT_READ, (far, near, None))
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    return
                here, there, drawn = key.data
                try:
                    frame = here.recv(_LARGEST)
                    if drawn is None or not drawn.falls_on(frame):
                        there.send(frame)
                except (BlockingIOError, InterruptedError):  # the card's queue is full: the frame is lost, as on a card
                    continue


if __name__ == "__main__":
    main(*sys.argv[1:])
