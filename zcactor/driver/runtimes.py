"""The runtime of a program, between `zc.init` and `zc.shutdown`: its own process, and an embedded node or a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any

from zcactor.control.drain import RESPONSE
from zcactor.errors import ZcactorError
from zcactor.logs import logger
from zcactor.peers.unretrieved_errors import ENDS
from zcactor.process import context
from zcactor.process.cluster import HeadService, MembershipService
from zcactor.process.tasks import all_of
from zcactor.rpc.messages import Status
from zcactor.rpc.services import Services
from zcactor.sizes import sized

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Iterator

    from zcactor.assembly.process import Process
    from zcactor.config import Config
    from zcactor.process.loops import LoopThread
    from zcactor.rpc.call import Call
    from zcactor.workers.orphans import LastResort
    from zcactor.workers.run_directory import RunDirectory

__all__ = ["EmbeddedRuntime", "JoinedRuntime", "Runtime", "end_agent", "summary_of"]

_AGENT_WORK = 6.0
"""Seconds that an agent which responds may take beyond the actors' own end, to kill and reap workers and to show the
last output; see the agent's constants."""
_AGENT_END = 3.0
"""Seconds from the agent's last answer, or from the end of its control socket, until it is killed."""
_END_PATIENCE = 0.5
"""Seconds after which the end of a program logs what it waits for."""
_SENDING, _SHARE = 1.0, 0.25
"""Seconds in which actors receive the calls that were made, before they are asked to end, and the share of the end's
time that these are at most: an actor whose loop is blocked receives nothing, and idle ones need the rest."""
_TURNS = 32
"""Turns of the loop in which a cancellation comes out that was due when the end began. The callback of a timer that has
expired cancels in the second turn, the loop's handler of a signal in the third, and each task that waits for another
one in between takes a turn more."""
_NAMED = 3
"""Calls that this log line names, and methods in the one about calls that have not run."""
_NOT_RUN = (Status.NO_SUCH_ACTOR, Status.STOPPED, Status.KILLED, Status.MOVED)
"""The answers to calls that have not run, or not to their end."""


class Runtime(ABC):
    """The runtime of a program, as `init` returns it: this process, and an embedded node or a joined cluster."""

    def __init__(self, config: Config, process: Process, directory: RunDirectory) -> None:
        self.config = config
        self.process = process
        self._directory = directory
        self._shell = _notebook()
        self._summed_up = False
        self.thread: LoopThread | None = None  # of the loop, where that is no loop of the program's
        process.use_numpy()
        if self._shell is not None:
            self._shell.events.register("pre_run_cell", self._before_cell)

    def _before_cell(self, _: object) -> None:
        """Use the store for NumPy in a notebook's cell: its context is new, and knows nothing of the one `init` ran
        in."""
        self.process.use_numpy()

    @property
    def node_id(self) -> str:
        """Id of the node whose agent knows the actors: 32 hexadecimal digits."""
        return self.process.sessions.head.hex()

    async def aclose(self, *, again: bool = False) -> None:
        """End this program's actors, and its node where the node is embedded. Idempotent.

        Args:
            again: whether Ctrl-C has come a second time, so that a cancellation that is due at the beginning counts as
                a later one.

        Actors get `Config.shutdown_timeout` seconds to run their queued calls and to close. A line of the log counts
        the calls that have not run by then, and others tell of failures that nobody awaits. An agent that does not
        respond is killed a second later. Cancelling skips the orderly part: actors are killed, and all else is still
        done. A cancellation that is due at the beginning skips nothing, and is raised at the end.
        """
        process = self.process
        process.unretrieved_errors.begin_end()
        process.tasks.closing = True  # actors end from here on, and the agent is asked for no cause
        grace = self.config.shutdown_timeout
        begun = list(self.unfinished())
        ending = asyncio.ensure_future(self._end_in_order(grace))
        telling = process.loop.call_later(_END_PATIENCE, self._tell_waiting, grace, asyncio.current_task())
        due = None
        try:
            if not again:
                due = await _due_cancellation()
            await asyncio.wait({ending}, timeout=grace)
            if not ending.done() and await self._responds():
                await asyncio.wait({ending}, timeout=_AGENT_WORK)
            if not ending.done():
                self._give_up()
        finally:
            telling.cancel()
            ending.cancel()
            ending.add_done_callback(_note_failure)
            self.tell_unfinished(dict.fromkeys([*begun, *self.unfinished()]))
            process.unretrieved_errors.close()
            self._let_go()
            try:
                await process.close()
                await self._ended()
            finally:
                self.end_now()
        if due is not None:
            try:
                raise due
            finally:
                due = None  # its traceback leads to this frame

    async def _end_in_order(self, grace: float) -> None:
        """Ask for the end of the actors, once they have received all calls, or those that they do in a moment."""
        process = self.process
        until = process.loop.time() + grace
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_SENDING, grace * _SHARE)):
                called = [remote for remote in list(process.sessions.remotes.values()) if remote.unfinished]
                await all_of([remote.received() for remote in called])
        await self._end_actors(until - process.loop.time())

    def _tell_waiting(self, grace: float, task: asyncio.Task[Any] | None) -> None:
        """Log what the end of the program waits for, and how to end at once."""
        if not self.config.warn_after:
            return
        running = list(
            dict.fromkeys(
                f"{call.label} in {call.target.label if call.target is not None else call.actor_label}"
                for session in self.process.sessions.all()
                for call in session.pending.values()
                if call.target is not None or call.actor_label
            )
        )
        more = f" and {len(running) - _NAMED} more" if len(running) > _NAMED else ""
        what = f"{', '.join(running[:_NAMED])}{more}" if running else "the actors to end"
        again = "again " if task is not None and task.cancelling() else ""
        logger.warning("waiting up to %g s for %s; Ctrl-C %sends it at once", grace, what, again)

    def unfinished(self) -> Iterator[Call]:
        """The calls of this program to actors whose outcome is not known."""
        for actor in list(self.process.sessions.remotes.values()):
            yield from list(actor.unfinished)

    def tell_unfinished(self, calls: Iterable[Call]) -> None:
        """Log the number of those of `calls` that have not ended, and the failures among the others that nobody awaits.

        Args:
            calls: those that were unfinished when the end began, or were made since.
        """
        unrun: Counter[str] = Counter()
        streams = False
        for call in calls:
            if not call.known or issubclass(type(call.error), ENDS) or call.status in _NOT_RUN:
                unrun[call.label] += 1
                streams = streams or call.stream is not None
            elif not call.retrieved and not call.awaited and call.status == Status.ERROR:
                self.process.unretrieved_errors.note(call)
        if not unrun:
            return
        named = ", ".join(f"{label} x{count}" if count > 1 else label for label, count in unrun.most_common(_NAMED))
        more = f" and {len(unrun) - _NAMED} more methods" if len(unrun) > _NAMED else ""
        total = unrun.total()
        logger.warning(
            "ended with %d call%s that had not ended: %s%s (await %s%s)",
            total, "" if total == 1 else "s", named, more, "it" if total == 1 else "them",
            "; a stream ends with its last item, or by aclose()" if streams else "",
        )  # fmt: skip

    async def _responds(self) -> bool:
        """Whether the node agent, which is late, still responds."""
        process = self.process
        try:
            async with asyncio.timeout(RESPONSE):
                await process.requests.ask(await process.connections.connect(process.sessions.head), Services.ping)
        except (TimeoutError, ZcactorError):
            return False
        return True

    @abstractmethod
    async def _end_actors(self, grace: float) -> None:
        """Ask for the end of the actors, idle ones in order within `grace` seconds."""

    @abstractmethod
    def _give_up(self) -> None:
        """Handle a node agent that does not respond."""

    @abstractmethod
    async def _ended(self) -> None:
        """Wait for the processes that end by themselves once `_let_go` was called."""

    def _let_go(self) -> None:
        context.clear_current()
        self.process.tasks.closing = True
        shell, self._shell = self._shell, None
        if shell is not None:
            shell.events.unregister("pre_run_cell", self._before_cell)

    def end_now(self) -> None:
        """End without an event loop, at the interpreter's exit or when the loop has been closed. Idempotent."""
        self._let_go()
        summary = self._summary()
        self._directory.remove()
        self.process.trimmer.abandon()
        self.process.sessions.end_leases()
        self.process.store.close()
        with contextlib.suppress(Exception):  # standard error is closed, full, or an object of the program's
            if summary and sys.stderr is not None and (self.config.summary == "on" or self._at_a_terminal()):
                print(summary, file=sys.stderr, flush=True)

    def _summary(self) -> str:
        """The line about the arrays of this program, once; empty where the setting ``summary`` is off."""
        if self._summed_up or self.config.summary == "off":
            return ""
        self._summed_up = True
        counters, devices = self.process.counters, self.process.store.devices_in_use
        mapped, pulled = (0, 0) if devices is None else (devices.bytes_mapped, devices.bytes_pulled)
        return summary_of(
            counters.calls - counters.requests, counters.bytes_lent + counters.bytes_mapped + mapped,
            counters.bytes_read + counters.bytes_received + pulled,
            sum(count.nbytes for count in self.process.copies.snapshot().values()),
        )  # fmt: skip

    def _at_a_terminal(self) -> bool:
        return sys.stderr.isatty() and _notebook() is None and "pytest" not in sys.modules

    def forget(self) -> None:
        """Close, in the child of a fork, the descriptors whose end tells other processes that the parent has ended."""
        self._directory.forget()


class EmbeddedRuntime(Runtime):
    """The runtime of a program with an embedded node, whose agent is our child."""

    def __init__(
        self, config: Config, process: Process, directory: RunDirectory, agent: subprocess.Popen[bytes],
        control: socket.socket, last_resort: LastResort,
    ) -> None:  # fmt: skip
        super().__init__(config, process, directory)
        self._agent = agent
        self._control = control
        self._last_resort = last_resort
        self._gone: asyncio.Future[None] = process.loop.create_future()
        """Done when the agent has ended."""
        self._pidfd = os.pidfd_open(agent.pid)
        process.loop.add_reader(self._pidfd, self._agent_ended)

    def __repr__(self) -> str:
        return f"<zcactor node {self.node_id[:8]}, agent pid {self._agent.pid}>"

    def _agent_ended(self) -> None:
        self.process.loop.remove_reader(self._pidfd)
        self._gone.set_result(None)
        if not self.process.tasks.closing:  # the agent was killed, and its zygote perhaps as well
            self.process.tasks.start(asyncio.to_thread(self._last_resort.end))

    async def _end_actors(self, grace: float) -> None:
        await self.process.head.ask(HeadService.shutdown, grace)

    def _give_up(self) -> None:
        logger.warning("the node agent, pid %d, does not end and is killed", self._agent.pid)
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _ended(self) -> None:
        try:
            async with asyncio.timeout(_AGENT_END):
                await asyncio.shield(self._gone)
        except TimeoutError:
            self._give_up()

    def tell_left(self) -> None:
        """Log that actors end at once, as the program exits without `zcactor.shutdown`."""
        left = [actor for actor in self.process.sessions.remotes.values() if actor.death is None and actor.location]
        if left:
            logger.warning(
                "the program ended without zc.shutdown(): %d actor%s ended at once, and open files may lack their end "
                "(use async with zc.init(), or with zc.init() in a plain script)",
                len(left), "" if len(left) == 1 else "s",
            )  # fmt: skip

    def _let_go(self) -> None:
        super()._let_go()
        self._control.close()  # the agent ends on this, even after an error here

    def end_now(self) -> None:
        """See `Runtime.end_now`."""
        self._let_go()
        end_agent(self._agent)
        if self._pidfd >= 0:
            if not self.process.loop.is_closed():
                self.process.loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._last_resort.end()
        self._last_resort.close()
        super().end_now()

    def forget(self) -> None:
        """See `Runtime.forget`."""
        super().forget()
        self._control.close()
        os.close(self._pidfd)
        self._agent.returncode = 0  # not a child of this process, which cannot wait for it


class JoinedRuntime(Runtime):
    """The runtime of a program that has joined a running cluster."""

    def __init__(self, config: Config, process: Process, directory: RunDirectory, address: str) -> None:
        super().__init__(config, process, directory)
        self._address = address

    def __repr__(self) -> str:
        return f"<zcactor cluster at {self._address}, head {self.node_id[:8]}>"

    async def _end_actors(self, grace: float) -> None:
        await self.process.head.ask(MembershipService.leave_driver, grace)

    def _give_up(self) -> None:
        """Do nothing: the cluster's head notices that we are gone."""

    async def _ended(self) -> None:
        """Return at once: the program has no process of its own to wait for."""


async def _due_cancellation() -> asyncio.CancelledError | None:
    """Take the first cancellation of this task, if it came while the task computed, or is due since then.

    The task still counts as cancelled. So the caller raises the error later, for the ``asyncio.timeout``, the
    ``TaskGroup`` or the runner that has cancelled the task and waits for it.

    Raises:
        CancelledError: the task was cancelled once more.
    """
    task = asyncio.current_task()
    assert task is not None, "a coroutine that awaits runs in a task"
    before = task.cancelling()
    due = None
    for _ in range(_TURNS):
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError as error:
            if due is not None or 0 < before < task.cancelling():
                raise
            due = error
    return due


def _notebook() -> Any:
    """IPython's shell in a notebook or at an IPython prompt; else None."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def summary_of(calls: int, by_reference: int, pulled: int, copied: int) -> str:
    """The closing line about a program's arrays; empty where it has used none.

    Args:
        calls: the number of its calls to actors.
        by_reference: bytes that it has passed and got by reference.
        pulled: bytes that came from other hosts.
        copied: bytes that it has copied in memory.
    """
    if not by_reference + pulled + copied:
        return ""
    made = f"{calls:,} call{'' if calls == 1 else 's'}"
    from_hosts = f", {sized(pulled)} from other hosts" if pulled else ""
    return f"zcactor: {made}, {sized(by_reference)} by reference{from_hosts}, {sized(copied)} copied by the program"


def _note_failure(ending: asyncio.Future[None]) -> None:
    if ending.cancelled():
        logger.debug("the node agent did not answer the request to end the actors in time")
    elif (error := ending.exception()) is not None:
        logger.debug("the node agent did not end the actors: %s", error)


def end_agent(agent: subprocess.Popen[bytes]) -> None:
    """Reap the agent, which was asked to end; kill it after `_AGENT_END` seconds."""
    try:
        agent.wait(_AGENT_END)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()
