"""Nodes of this host that outlive the command that starts them: `start_node` and `stop_nodes`."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from zcactor import ids
from zcactor.assembly.devices import offered_gpus
from zcactor.cluster.records import NodeFile, list_nodes, nodes_here, parent_of, started_at, write_record
from zcactor.cluster.rendezvous import outward
from zcactor.control.head_log import LogUnavailable, LogUnusable
from zcactor.driver.driver import HANG_AFTER, HEARTBEAT, resources_of
from zcactor.driver.finding import check_address, check_reachable, find_head, is_one
from zcactor.errors import AuthenticationError, ConnectionLost
from zcactor.folders import user_folder, variable_of, working_directory, writing
from zcactor.machine import check_calls
from zcactor.node.agent_main import launch, search_path, send_setup
from zcactor.objectstore.groups import default_capacity
from zcactor.process.loops import chosen_loop
from zcactor.standard import open_standard
from zcactor.token import default_file, find_token, make_token_file, read_token_file
from zcactor.transport.os_process import pid_space
from zcactor.transport.registry import tls_of
from zcactor.workers.kept_records import keep, kept_path, meeting_base
from zcactor.workers.run_directory import RunDirectory, named_base, shared_names
from zcactor.workers.zygote import wait_for_end

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import IO

    from zcactor.cluster.child import Agent
    from zcactor.config import Config
    from zcactor.control.entries import ClusterEntry

__all__ = [
    "DEFAULT_PORT", "EtcdState", "KeptState", "StartedNode", "TermOver", "cluster_in", "found_again", "has_member",
    "log_directory", "options_again", "start_node", "state_directory", "stop_nodes", "token_for", "until_ready",
    "while_led",
]  # fmt: skip

T = TypeVar("T")
_LOOK_AGAIN: Final = 0.1
"""Seconds until the head is looked for again."""
_TAIL: Final = 2000
"""Bytes of a log that are shown when its node does not start."""


# A node cannot start where the head that it was to join decides no more: the head was killed after it had been found,
# or was stopped, goes on, and does not know that its term is over before its log says so. Then the leading head is
# looked for.
class TermOver(ConnectionLost):
    """The head that a node was to join decides no more: it has ended, or another one decides."""


def while_led(join: Callable[[], T], seconds: float) -> T:
    """Return the result of ``join()``, which looks for the head and joins it. It is called again where the head that it
    has found decides no more, for so many seconds.

    Raises:
        TermOver: no other head was found in time.
        ConnectionLost: as ``join()`` raises it.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return join()
        except TermOver:
            if time.monotonic() + _LOOK_AGAIN > until:
                raise
        time.sleep(_LOOK_AGAIN)  # a head that is deposed may not know which one leads, and tells nobody when it does


def found_again(find: Callable[[], T]) -> Callable[[], T]:
    """A search for the head, for `while_led`: once ``find()`` has found one, it raises TermOver where it finds none."""
    found = False

    def look() -> T:
        nonlocal found
        try:
            result = find()
        except ConnectionLost as error:
            if not found:
                raise
            raise TermOver(str(error.args[0]), False) from error
        found = True
        return result

    return look


def until_ready(control: socket.socket, agent: Agent, timeout: float, log: Path | None) -> str:
    """The report of the node once it is ready: ``r``, or ``s`` for a standby, its address, and the lines behind that.

    Raises:
        ConnectionLost: it has not in time, or has reported why it cannot start.
        TermOver: the head that it was to join decides no more.
    """
    control.settimeout(timeout)
    try:
        told = control.recv(65536)
    except TimeoutError:
        raise ConnectionLost(f"the node did not start within {timeout:g} s (spawn_timeout)") from None
    except ConnectionResetError:
        told = b""
    if told[:1] in (b"r", b"s"):
        return told.decode()
    if told[:1] in (b"e", b"d"):
        raise (TermOver if told[:1] == b"d" else ConnectionLost)(f"the node could not start: {told[1:].decode()}")
    status = agent.wait()
    raise ConnectionLost(f"the node ended at its start with status {status}{_tail(log)}")


def _tail(log: Path | None) -> str:
    if log is None:
        return "; its own error is printed above"
    text = log.read_bytes()[-_TAIL:].decode("utf-8", "replace").strip()
    return f"; the end of {log}:\n{text}"


DEFAULT_PORT = 7433
"""The port of a head without a given port; not among the ports that IANA has assigned."""
_AGAIN = "import sys; sys.path[:] = {path!r}; from zcactor.cluster.again import main; main()"
_KILLED = 5.0
"""Seconds beyond their own time that nodes get to end before they are killed, and then to be gone."""


class KeptState(msgspec.Struct, frozen=True):
    """A head's log in a folder of this host."""

    folder: Path
    fresh: bool = False
    """Whether a cluster that the log knows is left, and a new one begun."""


class EtcdState(msgspec.Struct, frozen=True):
    """The log of a cluster's heads in etcd."""

    url: str
    fresh: bool = False
    """Whether a cluster that the log knows is left, and a new one begun."""
    standby: bool = False
    """Whether the head waits as long as another one leads."""


class StartedNode(msgspec.Struct, frozen=True):
    """A node, or a head, that is ready."""

    record: NodeFile
    token: str
    """The source of the token."""
    process: Agent
    """The process of the node's agent, or the head's."""
    control: socket.socket
    """The end of the control socket; a process that does not stay ends when this is closed."""
    told: bytes = b""
    """Lines that the agent has sent after its address; see `zcactor.node.launcher`."""
    member: StartedNode | None = None
    """The node that was started beside a head; None where the head has found one, and for a node."""

    @property
    def all(self) -> list[StartedNode]:
        """This one, and the node beside it."""
        return [self] if self.member is None else [self, self.member]


def log_directory(environ: Mapping[str, str]) -> Path:
    """The folder of nodes' logs: ``$XDG_STATE_HOME/zcactor/logs``.

    Raises:
        NoFolder: the user has no folder for it.
    """
    return user_folder("state", environ) / "logs"


def state_directory(environ: Mapping[str, str], host: str, port: int) -> Path:
    """The folder of the log of the head at this address: ``$XDG_STATE_HOME/zcactor/heads/<host>-<port>``.

    Raises:
        NoFolder: the user has no folder for it.
    """
    return log_directory(environ).with_name("heads") / f"{host}-{port}"


def start_node(
    config: Config, *, own_host: bool, head: str | None, port: int, resources: Mapping[str, float], stays: bool,
    launch: Callable[[int, IO[bytes] | None], tuple[Agent, socket.socket]] = launch,
    rank: int | None = None, process: ids.ProcessId | None = None, token: bytes | None = None, follows: str = "",
    state: KeptState | EtcdState | None = None,
) -> StartedNode:  # fmt: skip
    """Start a node on this host, or a head with a node beside it, and wait until they are ready.

    The two are processes of their own, so that the head can be killed and started again while the node goes on. A head
    that takes its cluster over starts a node only where none of that cluster is left on this host. The node ends when
    the head says so, or does not come back.

    Args:
        config: the settings of the node and its workers, and of the head.
        own_host: whether a setting names `config.host`. Otherwise a node that joins listens at the address by which it
            reaches the head.
        head: ``"host:port"`` of the head to join, or what else `zcactor.driver.finding.find_head` takes; None starts a
            head.
        port: the port at which the node listens, or the head; 0 lets the system choose, as it does for the node beside
            a head.
        resources: amounts of custom resources of the node, by name.
        stays: whether the node, or the head, outlives this process. Then it logs to a file; otherwise it prints here.
        launch: starts a process: `zcactor.node.agent_main.launch`, or where this process does nothing else
            `zcactor.cluster.child.fork_agent`.
        rank: of a node of a run, which SIGTERM does not end; see `zcactor.node.launcher`.
        process: the process id of the node, or the head; None makes a new one.
        token: the cluster's token; None looks for it, see `token_for`.
        follows: the id of the node in whose place this one starts, with its options; empty for none.
        state: where a head keeps its log. A head whose log knows a cluster that has not ended takes that cluster over.
            None keeps the log in memory. A standby is ready once it waits; the node beside it joins the head that
            leads.

    Raises:
        AuthenticationError: the token is missing where one is needed, is not safe, or is not the head's; likewise the
            certificate in the folder of `config.security`.
        ConnectionLost: the head does not answer, or a process did not become ready; the message says why. A head whose
            term is over, or that ends before the node has joined, is one of these where no other leads within
            `Config.head_timeout`.
        ValueError: `head` or the host is not a usable address, this host has fewer GPUs than the node is to offer, or
            uvloop is asked for by name and cannot be imported.
        OSError: a file or a process cannot be made.
    """
    check_calls()
    chosen_loop(config.loop)  # raises before there is a process
    open_standard()  # or a lock could get the number of one, which the agent gives to /dev/null
    if ipaddress.ip_address(config.host).is_unspecified:
        raise ValueError(
            f"{config.host} is no place where others find this host; give one of its addresses, for instance "
            f"--host {outward()}"
        )
    if head is not None:
        check_address(head)
    token, source = token_for(config, head) if token is None else (token, "the caller")
    tls = tls_of(config)
    if head is not None:
        until = time.monotonic() + config.head_timeout
        look = found_again(lambda: asyncio.run(find_head(head, token, tls, until - time.monotonic())))

        def join() -> StartedNode:
            identity = look()
            here = config if own_host else replace(config, host=identity.ours)
            check_reachable(here, identity)
            place = head if is_one(head) else identity.address.partition("@")[2]
            cluster = _Cluster(ids.ProcessId(identity.process), identity.address, place, head)
            starting = _Starting(here, token, source, resources, launch, rank)
            return starting.member(
                process or ids.new_process(), cluster, port, stays=stays, logs=stays, follows=follows
            )

        return while_led(join, config.head_timeout)
    if isinstance(state, EtcdState):
        starting = _Starting(config, token, source, resources, launch, rank)
        return _with_etcd(starting, token, state, port, stays=stays)
    before = None if state is None else cluster_in(state, token)
    if before is not None and not port:
        port = int(before.address.rpartition(":")[2])
    starting = _Starting(config, token, source, resources, launch, rank)
    node = process or (ids.ProcessId(before.cluster) if before is not None else ids.new_process())
    found = before is not None and has_member(node, token)
    started, cluster = starting.head(node, port, state, stays=stays, beside=not found)
    if found and has_member(node, token):  # it may have given its head up meanwhile
        return started
    return _with_member(starting, started, cluster, stays=stays, gently=before is None)


def _with_etcd(
    starting: _Starting, token: bytes, state: EtcdState, port: int, *, stays: bool
) -> StartedNode:  # fmt: skip
    """Start a head whose log is in etcd, or a standby, with a node beside it."""
    node = asyncio.run(_cluster_in_etcd(state.url, token))
    found = has_member(node, token)
    started, cluster = starting.head(node, port, state, stays=stays, beside=not found)
    if found and has_member(node, token):
        return started
    if started.record.role == "standby":
        try:
            cluster = starting.led(cluster, starting.patience)
        except BaseException:
            started.control.close()
            _kill(started.process)
            raise
    return _with_member(starting, started, cluster, stays=stays, gently=False)


def _with_member(
    starting: _Starting, started: StartedNode, cluster: _Cluster, *, stays: bool, gently: bool
) -> StartedNode:  # fmt: skip
    """Start a node beside a head. Where that fails the head ends, in order where `gently` says so: a head that ends in
    order takes along what it has taken over."""
    known = [cluster]
    until = time.monotonic() + starting.patience

    def join() -> StartedNode:
        there = known.pop() if known else starting.led(cluster, until - time.monotonic())
        return starting.member(ids.new_process(), there, 0, stays=True, logs=stays)

    try:
        member = while_led(join, starting.patience)
    except BaseException:
        if not gently:
            started.process.kill()
        started.control.close()
        _kill(started.process)
        raise
    return msgspec.structs.replace(started, member=member)


async def _cluster_in_etcd(url: str, token: bytes) -> ids.ProcessId:
    """The id of the clusters of that name.

    Raises:
        ConnectionLost: etcd does not tell it.
        ValueError: the URL or a variable is not as it must be.
    """
    from zcactor.control.etcd_log import EtcdLog

    log = EtcdLog.at(url, token, os.environ)
    try:
        return ids.ProcessId(await log.cluster(ids.new_process()))
    except (LogUnavailable, LogUnusable) as error:
        raise ConnectionLost(str(error), False) from error
    finally:
        await log.aclose()


class _Cluster(msgspec.Struct, frozen=True):
    """A cluster that a node can join."""

    id: ids.ProcessId
    head_address: str
    """The address of the head's process, with its id."""
    place: str
    """``host:port`` of the head, as it was given where that is one address."""
    head: str
    """The address by which it was found."""


class _Starting:
    """The start of a node, a head, or both, with the same settings; see `start_node`."""

    def __init__(
        self, config: Config, token: bytes, source: str, resources: Mapping[str, float],
        launch: Callable[[int, IO[bytes] | None], tuple[Agent, socket.socket]], rank: int | None,
    ) -> None:  # fmt: skip
        self._config, self._token, self._source, self._launch, self._rank = config, token, source, launch, rank
        self._custom = resources
        self._gpus = offered_gpus(config, os.environ)
        self._resources = resources_of(config, resources, self._gpus)

    @property
    def patience(self) -> float:
        """Seconds for which a head is looked for."""
        return self._config.head_timeout

    def led(self, cluster: _Cluster, patience: float) -> _Cluster:
        """The cluster, with the head that leads it at present, which is looked for for `patience` seconds."""
        found = asyncio.run(find_head(cluster.head, self._token, tls_of(self._config), patience))
        return _Cluster(cluster.id, found.address, found.address.partition("@")[2], cluster.head)

    def head(
        self, node: ids.ProcessId, port: int, state: KeptState | EtcdState | None, *, stays: bool, beside: bool
    ) -> tuple[StartedNode, _Cluster]:  # fmt: skip
        """Start a head, or a standby."""
        etcd = state if isinstance(state, EtcdState) else None
        setup = {
            "head": (node, ""), "port": port, "stays": stays, "resources": {}, "gpus": [],
            "state": (str(state.folder), state.fresh) if isinstance(state, KeptState) else None, "beside": beside,
            "etcd": None if etcd is None else (etcd.url, etcd.fresh, etcd.standby), "follows": "", "again": {},
            "record": node.hex() if etcd is None else ids.new_process().hex(),
        }  # fmt: skip
        started, address = self._start(node, node, None, setup, logs=stays)
        place = started.record.address
        return started, _Cluster(node, address, place, place)

    def member(
        self, node: ids.ProcessId, cluster: _Cluster, port: int, *, stays: bool, logs: bool, follows: str = ""
    ) -> StartedNode:  # fmt: skip
        """Start a node."""
        setup = {
            "head": (cluster.id, cluster.head_address), "port": port, "stays": stays, "resources": self._resources,
            "gpus": self._gpus, "state": None, "follows": follows,
            "again": options_again(self._config, self._token, cluster.head, port, self._custom, node.hex()),
        }  # fmt: skip
        return self._start(node, cluster.id, cluster.place, setup, logs=logs)[0]

    def _start(
        self, node: ids.ProcessId, cluster: ids.ProcessId, head: str | None, setup: Mapping[str, Any], *, logs: bool
    ) -> tuple[StartedNode, str]:  # fmt: skip
        """Start the process of a node, or of a head where `head` is None. Returns its address as well."""
        config, rank = self._config, self._rank
        with ExitStack() as undo:
            names = shared_names(cluster.hex(), self._token)
            directory = RunDirectory.shared(meeting_base(names, os.environ), *names)
            undo.callback(directory.remove)
            kept = kept_path(setup.get("record", node.hex()), os.environ)
            log = output = None
            if logs:
                log = log_directory(os.environ) / f"node-{setup.get('record', node.hex())[:8]}.log"
                with writing(log, f"set {variable_of('state')} to a folder of yours"):
                    output = undo.enter_context(open(log, "ab", buffering=0, opener=_private))
            agent, control = self._launch(directory.lock_fd, output)
            undo.callback(_kill, agent)
            undo.callback(control.close)
            send_setup(
                control,
                {
                    **setup, "directory": str(directory.path), "kept": kept, "token": self._token, "agent": node,
                    "driver": b"", "clustered": True, "loop": chosen_loop(config.loop), "config": asdict(config),
                    "cwd": working_directory(), "heartbeat": HEARTBEAT, "hang_after": HANG_AFTER, "rank": rank,
                    "worker": {
                        "store_capacity": config.store_capacity or default_capacity(), "namespace": config.namespace,
                    },
                },
            )  # fmt: skip
            role = "head" if head is None else "member"
            ready = until_ready(control, agent, config.spawn_timeout, log)
            if ready.startswith("s"):
                role = "standby"
            ready = ready[1:]
            address, _, told = ready.partition("\n")
            place = address.partition("@")[2]
            record = NodeFile(
                setup.get("record", node.hex()), agent.pid, started_at(agent.pid) or 0, role, place,
                head or place, str(log or ""), 0 if rank is None else os.getpid(),
                "" if role == "member" or cluster == node == bytes.fromhex(setup["record"]) else cluster.hex(),
                pid_space(), str(directory.path), named_base(),
            )  # fmt: skip
            write_record(directory.path, record)
            keep(kept, msgspec.json.encode(record))
            undo.pop_all()
            directory.forget()  # the process holds it
            if output is not None:
                output.close()
        return StartedNode(record, self._source, agent, control, told.encode()), address


def has_member(cluster: ids.ProcessId, token: bytes) -> bool:
    """Whether a node of that cluster runs on this host, which this user has started from the command line."""
    return any(record.role == "member" for record in nodes_here(shared_names(cluster.hex(), token)))


def options_again(
    config: Config, token: bytes, head: str | None, port: int, resources: Mapping[str, float], node: str
) -> dict[str, Any]:
    """The options by which an agent starts a node in its place: ``code``, and the ``data`` that the code reads.

    Args:
        config, head, port, resources: as for `start_node`.
        token: the cluster's.
        node: the agent's id.
    """
    options = {
        "config": asdict(replace(config, address=None)), "token": token, "head": head, "port": port,
        "resources": dict(resources), "follows": node,
    }  # fmt: skip
    return {"code": _AGAIN.format(path=search_path()), "data": msgspec.msgpack.encode(options)}


def cluster_in(state: KeptState, token: bytes) -> ClusterEntry | None:
    """The cluster that a head with this log takes over; None where it begins a new one."""
    from zcactor.control.entries import CLUSTER_KEY, ClusterEntry
    from zcactor.control.file_log import look_into  # with SQLite, which no other start needs

    found = None if state.fresh else look_into(state.folder, "cluster", token).get(CLUSTER_KEY)
    try:
        entry = None if found is None else msgspec.msgpack.decode(found, type=ClusterEntry)
    except msgspec.DecodeError:  # the head's process says what is wrong with the log
        return None
    return None if entry is None or entry.closed else entry


def token_for(config: Config, head: str | None) -> tuple[bytes, str]:
    """The token and its source; a head that only this host reaches makes a token where it finds none.

    Args:
        config: the settings of the node.
        head: ``"host:port"`` of the head to join; None for a head.

    Raises:
        AuthenticationError: there is no token where one is needed, or the one that was found is not safe.
        OSError: the file cannot be made.
    """
    found = find_token(None, os.environ)
    if found is not None:
        return found
    path = default_file(os.environ)
    if head is not None:
        raise AuthenticationError(
            f"to join {head} the cluster's token is needed: copy {path} from the head's host, or set "
            "ZCACTOR_TOKEN_FILE or ZCACTOR_TOKEN"
        )
    if not ipaddress.ip_address(config.host).is_loopback:
        raise AuthenticationError(
            f"a node at {config.host} can be reached from other hosts and needs a token: make one with 'zcactor token' "
            f"and copy {path} to every host of the cluster"
        )
    try:
        return make_token_file(path), str(path)
    except FileExistsError:  # another head was started at the same moment
        return read_token_file(path), str(path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _kill(agent: Agent) -> None:
    agent.terminate()
    try:
        agent.wait(_KILLED)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


def stop_nodes(
    grace: float, base: Path | None = None, *, which: Callable[[NodeFile], bool] = lambda record: True
) -> list[tuple[NodeFile, bool]]:  # fmt: skip
    """End every node of this user on this host that was started from the command line, and wait until they are gone.

    Args:
        grace: seconds in which idle actors are closed in order.
        base: the folder of run directories; the default stands for all nodes of `zcactor.cluster.records.nodes_here`.
        which: whether a node is to end; by default all are.

    Returns:
        Each node, and whether it ended by itself; otherwise it was killed.
    """
    ending: list[tuple[NodeFile, int]] = []
    for record in nodes_here() if base is None else list_nodes(base):
        if not which(record):
            continue
        try:
            pidfd = os.pidfd_open(record.pid)
        except ProcessLookupError:
            continue
        if started_at(record.pid) != record.started:  # it has ended, and its pid is another process's
            os.close(pidfd)
            continue
        ending.append((record, pidfd))
    heads = {record.address for record, _ in ending if record.role == "head"}
    # A head ends its members in order. Those that it has not ended are ended when it is gone.
    first = [each for each in ending if each[0].role == "head" or each[0].head not in heads]
    ended = _end(first, grace)
    ended.update(_end([each for each in ending if each[0].node not in ended], grace))
    for _, pidfd in ending:
        os.close(pidfd)
    return [(record, ended[record.node]) for record, _ in ending]


def _end(nodes: list[tuple[NodeFile, int]], grace: float) -> dict[str, bool]:
    """End nodes, each with its pidfd. Returns for each whether it ended by itself."""
    launchers = set()
    for record, pidfd in nodes:  # all are known by now: a head that ends takes its members along
        with suppress(ProcessLookupError):
            if record.launcher and parent_of(record.pid) == record.launcher:
                launchers.add(record.launcher)
            else:
                signal.pidfd_send_signal(pidfd, signal.SIGHUP)  # SIGTERM has a node's actors move
    for launcher in launchers:
        with suppress(ProcessLookupError):
            os.kill(launcher, signal.SIGTERM)  # the run ends in order, its program first
    deadline = time.monotonic() + grace + _KILLED
    result = {}
    for record, pidfd in nodes:
        ended = wait_for_end(pidfd, deadline - time.monotonic())
        if not ended:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            wait_for_end(pidfd, _KILLED)
        result[record.node] = ended
    return result
