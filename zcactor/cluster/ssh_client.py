"""Nodes on other hosts by the system's ssh: `bring_up` and `take_down`, the near end of ``zcactor up`` and ``down``.

Each host has one ssh, which stays until all nodes are ready. Where this process ends before that, each ssh loses its
input, and the far ends (`zcactor.cluster.ssh_remote`) end the nodes that they have started.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from zcactor.cluster.ssh_remote import KEEP, KEEP_ON, MARK, FarAnswer, FarOrder, script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence

__all__ = ["HostFailed", "HostsFailed", "Ways", "bring_up", "take_down"]

T = TypeVar("T")

_OPTIONS: Final = (
    "-o", "BatchMode=yes",  # no questions: there is nobody to answer them
    "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",  # a host that is silent for 15 s is given up
    "-o", "ControlMaster=no",  # a master would keep our pipes open
)  # fmt: skip
"""Options of ssh. Those in the user's command come before them, and the first one counts (ssh_config(5))."""
_PATIENCE: Final = 120.0
"""Seconds until a host must have answered: a node has 60 to start (`Config.spawn_timeout`), and a cold disk needs
more."""
_UNDOING: Final = 30.0
"""Seconds in which a host must have ended its node again: actors have 5 of them (`Config.shutdown_timeout`), and then
the rest is killed."""
_LAST_WORDS: Final = 10.0
"""Seconds in which ssh's words are read to their end when it has ended: another process may still hold the pipe."""
_TAIL: Final = 4000
"""Bytes of ssh's own words that are shown."""
_LINE: Final = 1 << 20
"""Bytes of the longest line that a host may print."""


class HostFailed(Exception):
    """A host on which nothing was done, or not everything.

    Attributes:
        host: its name.
        reason: the reason, one line.
        said: lines that ssh, or the host, has printed on standard error.
    """

    def __init__(self, host: str, reason: str, said: str = "") -> None:
        super().__init__(host, reason, said)
        self.host, self.reason, self.said = host, reason, said

    def __str__(self) -> str:
        return "\n  ".join([f"{self.host}: {self.reason}", *self.said.splitlines()])


class HostsFailed(Exception):
    """Hosts that failed, each with its own reason.

    Attributes:
        failures: a `HostFailed` for each.
    """

    def __init__(self, failures: Sequence[HostFailed]) -> None:
        super().__init__("\n".join(map(str, failures)))
        self.failures = tuple(failures)


class Ways(msgspec.Struct, frozen=True):
    """The way to the hosts."""

    ssh: tuple[str, ...]
    """The command for ssh, with the user's options."""
    python: str
    """The path of the interpreter on each host."""
    versions: tuple[str, str]
    """Those of zcactor and of Python, which each host must have."""
    patience: float = _PATIENCE
    """Seconds until a host must have answered."""


class _Connection:
    """The ssh to one host, from `greet` to `end`."""

    def __init__(self, host: str, ways: Ways) -> None:
        self.host = host
        self._ways = ways
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._said = b""
        self._lost = False
        """Whether the host does not answer any more."""
        self._started = False
        """Whether it has a node that ends with this connection."""

    async def greet(self) -> None:
        """Connect.

        Raises:
            HostFailed: the host cannot be reached, or has no interpreter or other versions.
        """
        there = (await self._bounded(self._connect())).versions
        if there != self._ways.versions:
            theirs = "nothing known" if there is None else "zcactor {} on Python {}".format(*there)
            ours = "zcactor {} on Python {}".format(*self._ways.versions)
            raise HostFailed(self.host, f"{theirs} is there, and {ours} is here: all hosts need the same")

    async def ask(self, order: FarOrder | str) -> FarAnswer:
        """Give the far end an order, or let it go on by a line.

        Raises:
            HostFailed: it was not carried out.
        """
        self._started = isinstance(order, FarOrder) and order.do == "start"
        return await self._bounded(self._ask(order))

    async def keep(self) -> None:
        """Let the started node stay.

        Raises:
            HostFailed: the connection was lost before the far end knew.
        """
        if await self._bounded(self._keep()):
            raise HostFailed(self.host, "the connection was lost before its node could stay", self._words())
        self._started = False

    async def end(self) -> str:
        """End ssh: by its input, whereupon the far end undoes what it did, or by a signal where it does not end.

        Returns:
            A line about the node that it had; empty where it had none.
        """
        process = self._process
        if process is None:
            return ""
        assert process.stdin is not None
        process.stdin.close()
        try:
            if not self._lost:
                async with asyncio.timeout(min(_UNDOING, self._ways.patience)):
                    await process.wait()
        except TimeoutError:
            self._lost = True
        finally:
            if process.returncode is None:
                process.kill()
            if self._listening is not None:
                self._listening.cancel()
                await asyncio.wait([self._listening])
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # a process that ssh has left may hold the pipes
        if not self._started:
            return ""
        if self._lost:
            return f"{self.host}: it may have a node now; end that by: zcactor down --hosts {self.host}"
        return f"{self.host}: its node was ended again"

    async def _bounded(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._ways.patience):
                return await work
        except TimeoutError:
            self._lost = True
            raise HostFailed(self.host, f"no answer in {self._ways.patience:g} s", self._words()) from None

    async def _connect(self) -> FarAnswer:
        command = self._ways.ssh[0]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._ways.ssh, *_OPTIONS, self.host, "sh", "-s",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, limit=_LINE,
            )  # fmt: skip
        except OSError as error:
            raise HostFailed(
                self.host,
                f"{command} cannot be started ({error.strerror}): install openssh-client, or name a command by --ssh "
                "or ZCACTOR_SSH",
            ) from error
        self._listening = asyncio.create_task(self._listen(self._process))
        return await self._ask(script(self._ways.python))

    async def _ask(self, order: FarOrder | str) -> FarAnswer:
        """Send an order, or the commands of the shell, and wait for the next line of the far end."""
        await self._send(order if isinstance(order, str) else msgspec.json.encode(order).decode() + "\n")
        process = self._process
        assert process is not None
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                if line.startswith(MARK.encode()):
                    answer = msgspec.json.decode(line[len(MARK) :], type=FarAnswer)
                    if answer.failed is not None:
                        self._started = False
                        raise HostFailed(self.host, answer.failed)
                    return answer
        except ValueError as error:  # of another version, or a line without an end
            raise HostFailed(self.host, f"its output is not that of zcactor: {error}") from error
        status = await process.wait()
        if self._listening is not None:
            await asyncio.wait([self._listening], timeout=_LAST_WORDS)
        self._lost = self._started
        ssh = self._ways.ssh[0]
        reason = f"{ssh} failed" if status == 255 else f"{ssh} ended with status {status} before it was done"
        raise HostFailed(self.host, reason, self._words())

    async def _keep(self) -> int:
        await self._send(KEEP)
        assert self._process is not None
        return await self._process.wait()

    async def _send(self, text: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the output says why
            self._process.stdin.write(text.encode())
            await self._process.stdin.drain()

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Take what ssh and the host print on standard error."""
        assert process.stderr is not None
        while data := await process.stderr.read(65536):
            self._said = (self._said + data)[-_TAIL:]

    def _words(self) -> str:
        return self._said.decode("utf-8", "replace").strip()


async def _all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Wait for all, and return their results.

    Raises:
        HostsFailed: some hosts failed.
    """
    results = await asyncio.gather(*work, return_exceptions=True)
    failures: list[HostFailed] = []
    found: list[T] = []
    for result in results:
        if isinstance(result, HostFailed):
            failures.append(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            found.append(result)
    if failures:
        raise HostsFailed(failures)
    return found


@contextlib.asynccontextmanager
async def _connected(
    hosts: Sequence[str], ways: Ways, say: Callable[[str], None]
) -> AsyncIterator[dict[str, _Connection]]:
    """Connections to hosts, which end with the block."""
    connections = {host: _Connection(host, ways) for host in hosts}
    try:
        yield connections
    finally:
        for line in await asyncio.gather(*(connection.end() for connection in connections.values())):
            if line:
                say(line)


async def bring_up(
    hosts: Sequence[str], head_host: str, ways: Ways, order: FarOrder, say: Callable[[str], None]
) -> str:
    """Start a head on one host and members on the others: all of them, or none.

    Cancelling ends the nodes that were started.

    Args:
        hosts: the names of all hosts, as ssh takes them.
        head_host: the one of the head.
        ways: the way to them.
        order: the cluster's token, and the options of each node.
        say: takes lines about the progress.

    Returns:
        ``host:port`` of the head.

    Raises:
        HostsFailed: some hosts failed; nodes on the others were ended again.
    """
    others = [host for host in hosts if host != head_host]
    async with _connected(hosts, ways, say) as connections:

        async def start(host: str, head: str | None) -> str:
            asked = msgspec.structs.replace(order, do="start", head=head, alone=not others)
            answer = await connections[host].ask(asked)
            if answer.ready is None:
                raise HostFailed(host, "its answer is not that of a node")
            say(f"{host}: {'head' if head is None else 'member'} ready at {answer.ready} ({answer.facts})")
            return answer.ready

        say(f"connecting to {', '.join(hosts)}")
        await _all_of(connection.greet() for connection in connections.values())
        (head,) = await _all_of([start(head_host, None)])
        await _all_of(start(host, head) for host in others)
        await _all_of(connection.keep() for connection in connections.values())
    return head


async def take_down(hosts: Sequence[str], ways: Ways, say: Callable[[str], None]) -> None:
    """End the nodes of this user on each host, as ``zcactor stop`` does there: members on all hosts, and then heads.

    Args:
        hosts: the names of the hosts, as ssh takes them.
        ways: the way to them.
        say: takes a line for each node.

    Raises:
        HostsFailed: some hosts failed; it was done on the others.
    """
    async with _connected(hosts, ways, say) as connections:
        waited_for = set(hosts)
        members_ended = asyncio.Event()

        async def stop(host: str) -> None:
            try:
                await connections[host].greet()
                members = (await connections[host].ask(FarOrder("stop"))).ended or ()
            finally:
                waited_for.discard(host)
                if not waited_for:
                    members_ended.set()
            await members_ended.wait()
            heads = (await connections[host].ask(KEEP_ON)).ended or ()
            for line in (*members, *heads) or ("no node of yours runs there",):
                say(f"{host}: {line}")

        await _all_of(stop(host) for host in hosts)
