"""The ports of two processes, and the pairs of them that both try."""

from __future__ import annotations

import ipaddress

import pytest

from zcactor.transport.verbs.peer.bootstrap import PortName
from zcactor.transport.verbs.peer.ports import MAX_PAIRS, Pairs


def port(address: str, *, is_global: bool = True, partition: int = 0xFFFF) -> PortName:
    """A port with that IP address."""
    gid = bytes(10) + b"\xff\xff" + ipaddress.ip_address(address).packed
    return PortName("mlx5_0", gid if is_global else bytes(16), is_global, partition)


def left(pairs: Pairs) -> list[tuple[int, int]]:
    """The pairs that are tried, where each of them fails."""
    return list(iter(pairs.next, None))


@pytest.mark.parametrize("leads", [False, True])
def test_both_ends_try_the_same_pairs(leads: bool) -> None:
    ours = [port(f"10.0.{number}.1") for number in (2, 0, 1)]
    theirs = [port(f"10.0.{number}.2") for number in (1, 2, 0, 3)]
    pairs = left(Pairs(ours, theirs, leads=leads))
    assert [pair[::-1] for pair in pairs] == left(Pairs(theirs, ours, leads=not leads))
    assert len(pairs) == len(set(pairs)) == MAX_PAIRS
    assert pairs[0] == (0, 0), "both prefer these"
    mine, other = pairs[1]
    assert ours[mine].gid[14] == theirs[other].gid[14], "addresses of one network"
    for ports in zip(*pairs[:3], strict=True):
        assert len(set(ports)) == 3, "one card that is dead is in one of these pairs only"


def test_only_ports_that_may_reach_each_other_are_paired() -> None:
    ours = [port("10.0.0.1", is_global=False), port("10.0.0.1", partition=0x8001), port("10.0.0.1")]
    theirs = [port("10.0.0.2", partition=0x7FFF), port("10.0.0.2", partition=1)]
    assert left(Pairs(ours, theirs, leads=True)) == [(1, 1), (2, 0)]
    assert Pairs(ours[:1], theirs, leads=True).most == 0


@pytest.mark.parametrize("leads", [False, True])
def test_ports_that_cannot_be_used_are_in_no_further_pair_and_take_no_attempt(leads: bool) -> None:
    """Two cards of each end are of no use: that leaves four pairs, all of which are tried."""
    ours, theirs = ([port(f"10.0.{number}.{end}") for number in range(4)] for end in (1, 2))
    dead = {(0, True), (1, True), (0, False), (3, False)}
    here, there = Pairs(ours, theirs, leads=leads), Pairs(theirs, ours, leads=not leads)
    tried = []
    while pair := here.next():
        assert there.next() == pair[::-1]
        mine, other = ((pair[0], True) in dead, (pair[1], False) in dead)
        if mine or other:
            here.leave_out(ours=mine, theirs=other)
            there.leave_out(ours=other, theirs=mine)
        else:
            tried.append(pair)
    assert there.next() is None
    assert sorted(tried) == [(2, 1), (2, 2), (3, 1), (3, 2)]
