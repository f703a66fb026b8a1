"""The invariants: each sees a violation that a test makes."""

from __future__ import annotations

import asyncio
import ctypes
import logging
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from simulation.invariants import POISON, Invariants
from tests.simulation.clusters import Bench, Keeper, bench
from zcactor.assembly.process import Process
from zcactor.errors import ProtocolError
from zcactor.rpc.messages import Kind


def broken(made: Bench) -> list[str]:
    return [each.invariant for each in made.record.broken]


def test_freed_bytes_are_poisoned_and_leased_ones_are_not() -> None:
    async def program(_: Process) -> tuple[Any, Any]:
        keeper: Any = await Keeper.spawn()
        kept, freed = zc.ones(1000, np.uint8), zc.ones(5000, np.uint8)
        assert await keeper.keep(kept) == 1000
        address = freed.ctypes.data
        del freed
        return (keeper, kept), address

    with bench(1) as made:
        Invariants(made.cluster, made.record)
        (keeper, kept), address = made.run(program)
        made.wait(30)
        assert bytes([POISON]) * 64 in ctypes.string_at(address, 5000)
        assert (kept == 1).all()
        del keeper, kept
        assert not made.record.broken


def test_a_lease_that_is_never_given_back_is_found() -> None:
    async def program(process: Process) -> Any:
        keeper: Any = await Keeper.options(lifetime="detached", name="k").spawn()
        await keeper.keep(zc.ones(100_000, np.uint8))
        return keeper

    with bench(1) as made:
        invariants = Invariants(made.cluster, made.record)
        keeper = made.run(program)
        invariants.at_rest(ended=False)
        assert "I8" in broken(made)
        assert any("a lease of" in each.text for each in made.record.broken)
        del keeper


def test_at_rest_nothing_is_left() -> None:
    async def program(_: Process) -> None:
        keeper: Any = await Keeper.spawn()
        await keeper.keep(zc.ones(100_000, np.uint8))
        await keeper.keep("nothing")
        await zc.kill(keeper)

    with bench(2) as made:
        invariants = Invariants(made.cluster, made.record)
        made.run(program)
        made.wait(5)
        invariants.at_rest(ended=True)
        assert not made.record.broken, [each.plain() for each in made.record.broken]


def test_credits_and_amounts_that_are_lost_are_found() -> None:
    async def program(process: Process) -> None:
        next(iter(process.sessions.all())).credits.take()

    with bench(1) as made:
        invariants = Invariants(made.cluster, made.record)
        made.run(program)
        node: Any = made.cluster.hosts["h0"].node
        node._ledger.add("another", {"CPU": 1.0})
        node._ledger._nodes["another"].free["CPU"] = 0.5
        invariants.at_rest(ended=True)
        assert "I7" in broken(made)
        assert "I9" in broken(made)


def test_a_window_that_is_exceeded_is_found_at_once() -> None:
    async def program(process: Process) -> None:
        keeper: Any = await Keeper.spawn()
        await keeper.keep("x")
        (session,) = [each for each in process.sessions.all() if each.peer_process != process.sessions.head]
        for number in range(50):  # frames that take no credit
            session._outgoing.frame(int(Kind.STREAM_CREDIT), 0, 0, 0, number, 1, (), b"")
        session.connection.flush()
        with pytest.raises(zc.ZcactorError):
            await keeper.keep("x")

    with bench(1, recv_depth=8) as made:
        Invariants(made.cluster, made.record)
        made.run(program)
        assert "I7" in broken(made)
        assert "frames outstanding, its window is 6" in made.record.broken[0].text


def test_a_ledger_that_is_wrong_is_found_while_actors_live() -> None:
    async def program(_: Process) -> tuple[Any, Any]:
        keeper: Any = await Keeper.options(num_cpus=6).spawn()
        waits = asyncio.ensure_future(Keeper.options(num_cpus=6).spawn())
        await asyncio.sleep(1)
        return keeper, waits

    with bench(1) as made:
        invariants = Invariants(made.cluster, made.record)
        keeper, waits = made.run(program)
        host = made.cluster.hosts["h0"]
        assert host.agent is not None
        invariants._watch_head(host.agent)
        made.wait(5)
        assert not made.record.broken, [each.text for each in made.record.broken]
        node: Any = host.node
        (amounts,) = node._ledger._nodes.values()
        amounts.free["CPU"] = 8.0
        made.wait(5)
        assert {each.text for each in made.record.broken} == {
            "of 8 CPU 8 are free, and actors have 6", "a request for {'CPU': 6.0} waits, and there is room for it",
        }  # fmt: skip
        assert set(broken(made)) == {"I9"}
        del keeper, waits


def test_what_is_logged_or_caught_by_nobody() -> None:
    with bench(1) as made:
        invariants = Invariants(made.cluster, made.record)
        logger = logging.getLogger("zcactor.test")
        logger.addHandler(invariants)
        try:
            logger.error("a defect", exc_info=KeyError("x"))
            logger.warning("no defect")
        finally:
            logger.removeHandler(invariants)
        made.world.problems.append((1.0, "caught by nobody"))
        invariants.problems()
        loop = next(iter(made.world.loops.values()))
        made.cluster.network.on_lost(loop, ProtocolError("a frame of nobody's"))
        made.cluster.network.on_lost(loop, None)
        assert broken(made) == ["I11"] * 3
