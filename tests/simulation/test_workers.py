"""Forks and ends of simulated workers."""

from __future__ import annotations

from simulation.loop import SimLoop
from simulation.trace import Trace
from simulation.workers import SimWorkers
from simulation.world import World
from zcactor.ids import ProcessId
from zcactor.workers.worker_table import WorkerRecord


def test_a_worker_from_fork_to_end() -> None:
    world = World(1, Trace())
    agent = world.process("h0", "agent")
    forked: list[SimLoop] = []
    ended: list[tuple[bytes, str]] = []

    def work(_: WorkerRecord) -> SimLoop:
        forked.append(world.process("h0", f"w{len(forked)}"))
        return forked[-1]

    def kill(loop: SimLoop, cause: str) -> None:
        world.end(loop, cause)
        workers.gone(loop, cause)

    workers = SimWorkers(agent, work, kill, lambda record: ended.append((record.process, record.ended.result())))
    one = workers.start("one", {}, ProcessId(b"d" * 16), shared=False, process=ProcessId(b"1" * 16))
    never = workers.start("never", {}, ProcessId(b"d" * 16), shared=False, process=ProcessId(b"2" * 16))
    never.kill("it was not wanted")
    assert not forked
    world.run(lambda: False, limit=1)
    assert len(forked) == 1
    assert ended == [(b"2" * 16, "it was not wanted")]
    assert never.ready.exception() is not None
    one.ready.set_result(None)
    workers.kill_all(None)
    one.kill("too late")
    world.run(lambda: False, limit=2)
    assert forked[0].dead
    assert ended[1] == (b"1" * 16, "too late")
    one.kill()
    assert not workers.by_process
    workers.drain_output()
    workers.close()
