"""The ports of two processes, and the pairs of them that both try."""

from __future__ import annotations

import ipaddress

import pytest

from zcactor.transport.verbs.peer.bootstrap import PortName
from zcactor.transport.verbs.peer.ports import MAX_PAIRS, pairs_of


def port(address: str, *, is_global: bool = True, partition: int = 0xFFFF) -> PortName:
    """A port with that IP address."""
    gid = bytes(10) + b"\xff\xff" + ipaddress.ip_address(address).packed
    return PortName("mlx5_0", gid if is_global else bytes(16), is_global, partition)


@pytest.mark.parametrize("leads", [False, True])
def test_both_ends_try_the_same_pairs(leads: bool) -> None:
    ours = [port(f"10.0.{number}.1") for number in (2, 0, 1)]
    theirs = [port(f"10.0.{number}.2") for number in (1, 2, 0, 3)]
    pairs = pairs_of(ours, theirs, leads=leads)
    assert [pair[::-1] for pair in pairs] == pairs_of(theirs, ours, leads=not leads)
    assert len(pairs) == len(set(pairs)) == MAX_PAIRS
    assert pairs[0] == (0, 0), "both prefer these"
    mine, other = pairs[1]
    assert ours[mine].gid[14] == theirs[other].gid[14], "addresses of one network"
    for ports in zip(*pairs[:3], strict=True):
        assert len(set(ports)) == 3, "one card that is dead is in one of these pairs only"


def test_only_ports_that_may_reach_each_other_are_paired() -> None:
    ours = [port("10.0.0.1", is_global=False), port("10.0.0.1", partition=0x8001), port("10.0.0.1")]
    theirs = [port("10.0.0.2", partition=0x7FFF), port("10.0.0.2", partition=1)]
    assert pairs_of(ours, theirs, leads=True) == [(1, 1), (2, 0)]
    assert pairs_of(ours[:1], theirs, leads=True) == []
