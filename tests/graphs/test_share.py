"""One process's share of a graph: forged, repeated and late frames, and what is left of it."""

from __future__ import annotations

from typing import Any

import pytest

import zcactor as zc
from tests.graphs.parts import Node, Opened, failure_of, line
from zcactor.errors import ProtocolError
from zcactor.graphs.layout import RUN_BITS
from zcactor.graphs.service import GraphService
from zcactor.graphs.values import PLAIN, Outcome
from zcactor.rpc.messages import Status
from zcactor.rpc.services import Services


@pytest.fixture
def node(zc_runtime: zc.Runtime) -> zc.Runtime:
    return zc_runtime


async def compiled(node: Any) -> tuple[Any, Any, Any]:
    """A graph of two actors, this process's share of it, and the actors."""
    actors = [await Node.spawn() for _ in range(2)]
    run = await line(actors[0].add, actors[1].passes)
    (share,) = node.process.graphs()._shares.values()
    return run, share, actors


async def test_values_that_nobody_expects_are_refused(node: Any) -> None:
    run, share, (_, last) = await compiled(node)
    for key in (0, 1, 1 << RUN_BITS | 1, 99 << RUN_BITS | 1, 3 << RUN_BITS):
        with pytest.raises(ProtocolError, match="came to a process that does not take it"):
            share.arrived(key, 5, (), PLAIN)
    with pytest.raises(ProtocolError, match="these take values alone"):
        node.process.pushes.expectations.pushed(share.word, 3 << RUN_BITS | 1, Status.ERROR, b"", (), 0)
    share.arrived(3 << RUN_BITS | 77, 5, (), PLAIN)  # an output of a run that was given up, or never was
    await last.open()
    assert await run(1) == 2
    await run.close()


async def test_a_forged_frame_ends_its_connection_alone(node: Any) -> None:
    run, share, (first, last) = await compiled(node)
    reference = run(1)
    while not await last.has_entered():
        pass
    process = node.process
    session = process.sessions.used[first._remote.location[0]]
    session.push(99 << RUN_BITS | 1, share.word, Status.OK, b"\x01", (), 0)
    error = await failure_of(reference)
    assert isinstance(error, zc.ActorDied | zc.ConnectionLost)
    await last.open()
    assert await run(3) == 4  # both actors live: the graph is compiled again
    await run.close()


async def test_values_of_a_graph_that_is_forgotten_are_dropped(node: Any) -> None:
    run, share, (first, last) = await compiled(node)
    await last.open()
    assert await run(1) == 2
    await run.close()
    session = node.process.sessions.used[first._remote.location[0]]
    session.push(1, share.word, Status.OK, b"\x01", (), 0)
    node.process.graphs().failed(share.key, 3, 1, Outcome(1, b""))
    node.process.graphs().cancel(share.key, 1)
    node.process.graphs().noted(share.key, 1, 1)
    node.process.graphs().broken(share.key, "x", "y", True)
    assert await first.add(1) == 2


async def test_a_value_that_comes_twice(node: Any) -> None:
    run, share, (first, last) = await compiled(node)
    await first.repeat_value(share.key)
    await last.open()
    assert await run(2) == 3
    await run.close()


@pytest.mark.parametrize("method", [GraphService.forget, GraphService.noted])
async def test_a_message_that_cannot_be_taken_gets_no_answer_as_any_other(node: Any, method: Any) -> None:
    """An answer would end the connection: nobody waits for one."""
    actor: Any = await Node.spawn()
    assert await actor.add(1) == 2
    requests, session = node.process.requests, node.process.sessions.used[actor._remote.location[0]]
    requests.send(session, method, (Opened(KeyError),))
    requests.send(session, method, (1, 2, 3, 4))
    assert await requests.ask(session, Services.ping) and session.closed is None
    assert not session.pending
