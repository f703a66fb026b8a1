"""One rank of ``zcactor run``: its node, and on rank 0 the program, until the program has ended.

This process has one thread and no event loop, so that its agent can be a fork of it. It waits for three things by poll:
lines from the agent (`zcactor.node.launcher`), the program's end, and signals.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from zcactor.cluster.child import fork_agent
from zcactor.cluster.daemon import start_node, token_for
from zcactor.cluster.pmi import KeyValueSpace
from zcactor.cluster.program import OF_BATCH_SYSTEMS, CannotStart, RunProgram, Signals
from zcactor.cluster.records import nodes_here
from zcactor.cluster.rendezvous import (
    PORTS,
    Meeting,
    address_text,
    addresses_of,
    bindable,
    cluster_of,
    first_port,
    folder_of,
    living,
    outward,
    seek,
    sweep_meetings,
)
from zcactor.cluster.slurm import address_in_slurm, hosts_of
from zcactor.cluster.sources import OWN
from zcactor.errors import AuthenticationError, ConnectionLost
from zcactor.token import default_file, find_token
from zcactor.transport.registry import tls_of
from zcactor.workers.run_directory import base_directory, sweep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zcactor.cluster.daemon import StartedNode
    from zcactor.cluster.sources import Spot
    from zcactor.config import Config

__all__ = ["Request", "run_rank"]

_LOOPBACK: Final = "127.0.0.1"
_KEY: Final = "zcactor"
"""The key of the head's address in the launcher's space."""
_HEADS_WORD: Final = 2.0
"""Seconds beyond the program's grace in which a rank that was told to end waits for the head's word."""
_AGENT_WORK: Final = 10.0
"""Seconds beyond the actors' own time that an agent gets to end, before it is killed."""
_QUIET: Final = 2.0
"""Seconds of waiting for nodes without a line about it, and between two such lines."""
_LAUNCHERS_OWN: Final = ("PMI_FD", "PMI_RANK", "PMI_SIZE")
"""MPICH's variables, which are of no use to the program: the talk with the launcher is over."""


class Request(msgspec.Struct, frozen=True):
    """The options of a run."""

    program: tuple[str, ...]
    nodes: int
    """The number of nodes that must have joined when the program starts."""
    timeout: float
    """Seconds from the start of this process until they must have joined."""
    grace: float
    """Seconds between SIGTERM and SIGKILL for the program."""


def run_rank(config: Config, spot: Spot, request: Request, environ: Mapping[str, str], *, own_host: bool) -> int:
    """Be one rank of a run until it is over.

    Args:
        config: the settings of the node.
        spot: this rank's place; see `zcactor.cluster.sources.decide`.
        request: the program, and how it is run.
        environ: the environment of this process.
        own_host: whether a setting names `config.host`.

    Returns:
        The exit status of the program, which is that of every rank.

    Raises:
        ZcactorError: this rank could not start; the message says why.
        OSError, ValueError: a file or a process cannot be made, or a host is not a usable address.
        SystemExit: a signal came before the node was ready.
    """
    deadline = time.monotonic() + request.timeout
    for name in OWN:  # they are not for actors
        os.environ.pop(name, None)
    with Signals() as signals, ExitStack() as undo:
        rank = _Rank(replace(config, address=None), spot, request, environ, deadline, signals, undo, own_host=own_host)
        return rank.lead() if spot.rank == 0 else rank.follow()


class _Rank:
    """A rank, from its start to its end."""

    def __init__(
        self, config: Config, spot: Spot, request: Request, environ: Mapping[str, str], deadline: float,
        signals: Signals, undo: ExitStack, *, own_host: bool,
    ) -> None:  # fmt: skip
        self._config, self._spot, self._request, self._environ = config, spot, request, environ
        self._deadline, self._signals, self._undo, self._own_host = deadline, signals, undo, own_host
        self._space: KeyValueSpace | None = None
        self._run = spot.run
        self._hosts: list[str] = []
        self._addresses: list[str] = []
        """The head's addresses, once its name has led to some."""
        if spot.way == "launcher":
            self._space = KeyValueSpace(int(spot.where), deadline)
            self._run = self._space.name
        elif spot.way == "nodes":
            self._hosts = hosts_of(spot.where, environ)

    # ---------------------------------------------------------------- where the head is

    def _head_addresses(self) -> list[str]:
        """The IP addresses at which the head may be, where its host's name is known."""
        if self._spot.one_host:
            return [_LOOPBACK]
        if not self._addresses:
            name = self._hosts[0] if self._spot.way == "nodes" else self._spot.where
            try:
                self._addresses = addresses_of(name)
            except ConnectionLost:
                if self._spot.way != "nodes":
                    raise
                self._addresses = addresses_of(address_in_slurm(name, self._environ))  # as of virtual nodes
        return self._addresses

    def _ports(self) -> Sequence[int]:
        first = first_port(self._run)
        return [self._spot.port] if self._spot.port is not None else range(first, first + PORTS)

    @property
    def _named(self) -> bool:
        return self._spot.way in ("name", "nodes")

    def _listening_host(self) -> str:
        """The address at which the head listens."""
        if self._own_host:
            return self._config.host
        if self._spot.way == "alone" or self._spot.one_host:
            return _LOOPBACK
        if not self._named:
            return outward()
        found = self._head_addresses()
        for address in found:
            try:
                bindable(address, 0)
            except OSError:
                continue
            return address
        raise ConnectionLost(
            f"rank 0 is on this host, and the head is to be {self._spot.head}, at {', '.join(found)}: this host has no "
            "such address"
        )

    # ---------------------------------------------------------------- rank 0

    def lead(self) -> int:
        """Start the head, wait for the nodes, run the program, end all. Returns the program's status."""
        config = replace(self._config, host=self._listening_host())
        secret, _ = token_for(config, None)
        node = self._start_head(config, secret)
        assert node.member is not None
        self._undo.callback(_Line(node.member).status)
        line = _Line(node)
        self._undo.callback(line.status)
        if self._spot.way == "folder":
            folder = folder_of(self._environ)
            meeting = Meeting(folder, self._run)
            meeting.publish(node.record.address)
            self._undo.callback(meeting.remove, node.record.address)
            sweep_meetings(folder, time.time())
        elif self._space is not None:
            if self._spot.size > 1:
                self._space.put(_KEY, node.record.address)
                self._space.barrier()
            self._space.finalize()
        self._signals.wait()
        line.send("watch", value=True)
        status, text = self._gather(line)
        if status is None:
            status, text = self._play(line, node.record.address)
        line.send("end", value=[status, text, self._config.shutdown_timeout])
        line.wait_for_end(self._config.shutdown_timeout + _AGENT_WORK)
        if text:
            _say(text)
        return status

    def _start_head(self, config: Config, secret: bytes) -> StartedNode:
        before = None
        if self._spot.way == "folder":
            before = Meeting(folder_of(self._environ), self._run).look()
            if before is not None and not asyncio.run(living(before, self._run, secret, tls_of(config))):
                before = None
        elif self._named:
            ours = cluster_of(self._run, secret).hex()
            heads = [node.address for node in nodes_here() if node.node == ours]
            before = heads[0] if heads else None
        if before is not None:
            raise ConnectionLost(f"rank 0 of this run was started already: its head is at {before}")
        if not self._named:
            return self._start(config, 0, secret)
        for port in self._ports():
            if bindable(config.host, port):
                try:
                    return self._start(config, port, secret)
                except ConnectionLost:
                    if bindable(config.host, port):  # it failed for another reason than the port
                        raise
        ports = self._ports()
        which = f"port {ports[0]}" if len(ports) == 1 else f"no port from {ports[0]} to {ports[-1]}"
        taken = "is taken by another program" if len(ports) == 1 else "is free"
        raise ConnectionLost(
            f"the head cannot listen at {config.host}: {which} {taken}; ZCACTOR_HEAD=host:port names one"
        )

    def _start(self, config: Config, port: int, secret: bytes) -> StartedNode:
        return start_node(
            config, own_host=True, head=None, port=port, resources={}, stays=False, launch=fork_agent, rank=0,
            process=cluster_of(self._run, secret) if self._run else None,
        )  # fmt: skip

    def _gather(self, line: _Line) -> tuple[int | None, str]:
        """Wait for the nodes. Returns the status and a line for people where the program is not to start."""
        began = time.monotonic()
        next_word = began + _QUIET
        while not (line.ranks or line.ended or self._signals.number):  # its own rank, which has joined
            line.wait(None, self._signals.fd)
        while len(line.ranks) < self._request.nodes:
            now = time.monotonic()
            if now >= self._deadline:
                return 1, f"{self._missing(line)} did not join in {self._request.timeout:g} s; {self._joined(line)}"
            if now >= next_word:
                _say(f"waiting for {self._missing(line)}; {self._joined(line)} after {now - began:.0f} s")
                next_word = now + _QUIET
            line.wait(min(self._deadline, next_word) - now, self._signals.fd)
            if self._signals.number:
                return self._signals.status, ""
            if line.ended:
                return 1, "the head has ended before the program began"
        return None, ""

    def _missing(self, line: _Line) -> str:
        missing = [
            f"{rank} ({self._hosts[rank]})" if len(self._hosts) == self._spot.size else str(rank)
            for rank in range(self._spot.size)
            if rank not in line.ranks
        ]
        return f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"

    def _joined(self, line: _Line) -> str:
        return f"joined: {len(line.ranks)} of {self._request.nodes}"

    def _play(self, line: _Line, address: str) -> tuple[int, str]:
        """Run the program. Returns its status and a line for people."""
        left_out = {*OWN, *(_LAUNCHERS_OWN if self._space is not None else ())}
        environ = {name: value for name, value in self._environ.items() if name not in left_out}
        try:
            program = RunProgram(self._request.program, {**environ, "ZCACTOR_ADDRESS": address})
        except CannotStart as error:
            return error.status, str(error)
        self._signals.hand_on(OF_BATCH_SYSTEMS, program.send)
        self._undo.callback(program.close)
        while (status := program.status()) is None:
            if self._signals.number or line.ended:
                program.end(self._request.grace)
            watched = [program.pidfd] if self._signals.number else [program.pidfd, self._signals.fd]
            line.wait(program.patience(), *watched)
        if self._signals.number:
            return self._signals.status, ""
        if line.ended:
            return status or 1, "the head was lost, and the run with it"
        return status, ""

    # ---------------------------------------------------------------- the other ranks

    def follow(self) -> int:
        """Join the head's cluster and wait for its word. Returns the program's status."""
        self._signals.hand_on((signal.SIGUSR1, signal.SIGUSR2), lambda number: None)  # the program is at rank 0
        head = self._find()
        node = start_node(
            self._config, own_host=self._own_host, head=head, port=0, resources={}, stays=False, launch=fork_agent,
            rank=self._spot.rank,
        )  # fmt: skip
        line = _Line(node)
        self._undo.callback(line.status)
        self._signals.wait()
        give_up: float | None = None
        while not line.ended:
            if self._signals.number and give_up is None:
                give_up = time.monotonic() + self._request.grace + _HEADS_WORD
            if give_up is None:
                line.wait(None, self._signals.fd)
                continue
            left = give_up - time.monotonic()
            if left <= 0:
                break
            line.wait(left)
        if line.over is not None:
            status, text = line.over
            if text:
                _say(f"rank 0 says: {text}")
            return status
        if self._signals.number:
            return self._signals.status
        killed = line.status()
        _say(f"this rank's node ended with status {killed}" if killed else "rank 0 is lost, and the run with it")
        return 1

    def _find(self) -> str:
        """The head's address, once it answers.

        Raises:
            ConnectionLost: it did not answer in time.
            AuthenticationError: there is no token, or the head has another one.
            VersionMismatch: the head has another version.
        """
        meeting = None if self._spot.way != "folder" else Meeting(folder_of(self._environ), self._run)
        told = ""
        if self._space is not None:
            self._space.barrier()
            told = self._space.get(_KEY)
            self._space.finalize()

        def places() -> list[str]:
            if told:
                return [told]
            if meeting is None:
                return [address_text(host, port) for host in self._head_addresses() for port in self._ports()]
            found = meeting.look()
            if found is None:
                raise ConnectionLost(
                    f"{meeting.path} did not appear: either rank 0 has not started, or its host does not share this "
                    "folder, and ZCACTOR_RENDEZVOUS=DIR has to name one that all hosts share"
                )
            return [found]

        def token() -> bytes | None:
            found = find_token(None, self._environ)
            if found is None and not self._on_this_host():
                raise AuthenticationError("there is no token")
            return None if found is None else found[0]

        exact = not self._named or self._spot.port is not None
        try:
            return asyncio.run(seek(places, self._run, token, tls_of(self._config), self._deadline, exact=exact))
        except ConnectionLost as error:
            raise ConnectionLost(
                f"rank 0 ({self._spot.head}) did not answer in {self._request.timeout:g} s: {error.args[0]}"
            ) from error
        except AuthenticationError as error:
            if find_token(None, self._environ) is not None:
                raise
            raise AuthenticationError(
                f"to join rank 0 ({self._spot.head}) the cluster's token is needed: make one with 'zcactor token' and "
                f"copy {default_file(self._environ)} to every host, or set ZCACTOR_TOKEN"
            ) from error

    def _on_this_host(self) -> bool:
        """Whether the head makes a token where it finds none: its address leads nowhere else."""
        if self._spot.one_host:
            return True
        try:
            return self._named and all(ipaddress.ip_address(each).is_loopback for each in self._head_addresses())
        except (ConnectionLost, ValueError):
            return False


class _Line:
    """The launcher's end of an agent's control socket: the facts that the agent has told, and its end."""

    def __init__(self, node: StartedNode) -> None:
        self._node = node
        self._rest = b""
        self.ranks: dict[int, tuple[str, int]] = {}
        """Host and pid of each rank that has joined."""
        self.over: tuple[int, str] | None = None
        """The program's status, and a line for people, once the head has told them."""
        self.ended = False
        """Whether the agent has closed the socket."""
        node.control.settimeout(_AGENT_WORK)
        self._take(node.told)

    def send(self, key: str, *, value: Any) -> None:
        """Send the agent a line; without effect where it has ended."""
        try:
            self._node.control.sendall(msgspec.json.encode({key: value}) + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self.ended = True

    def wait(self, seconds: float | None, *descriptors: int) -> None:
        """Wait until the agent has told something or has ended, or one of `descriptors` is readable.

        Args:
            seconds: at most; None waits for ever.
            descriptors: further ones to wait for.
        """
        poll = select.poll()
        for fd in descriptors:
            poll.register(fd, select.POLLIN)
        if not self.ended:
            poll.register(self._node.control, select.POLLIN)
        found = poll.poll(None if seconds is None else max(seconds, 0.0) * 1000)
        if not self.ended and any(fd == self._node.control.fileno() for fd, _ in found):
            self._read()

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the agent has ended, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.ended and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())

    def _read(self) -> None:
        try:
            data = self._node.control.recv(65536)
        except ConnectionResetError:
            data = b""
        self.ended = not data
        self._take(data)

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            told = msgspec.json.decode(line)
            if "ranks" in told:
                self.ranks = {rank: (host, pid) for rank, host, pid in told["ranks"]}
            if "over" in told:
                status, text = told["over"]
                self.over = status, text

    def status(self) -> int:
        """Let the agent end, and kill it if it does not. Returns its exit status, negative where a signal has ended
        it."""
        self._node.control.close()
        try:
            status = self._node.process.wait(_AGENT_WORK)
        except subprocess.TimeoutExpired:
            self._node.process.kill()
            status = self._node.process.wait()
        if status:
            sweep(base_directory())  # a node that is killed leaves its directory
        return status


def _say(text: str) -> None:
    print(f"zcactor: {text}", file=sys.stderr, flush=True)
