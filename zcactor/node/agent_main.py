"""The process of a node's agent, and that of a head: how a driver or the command line launches it, and its main
function.

An embedded node's agent is the head of its cluster. The head that others join is a process of its own, without workers;
the agent of the node on its host is a process beside it, like those on other hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from zcactor.folders import working_directory
from zcactor.logs import logger
from zcactor.standard import open_standard
from zcactor.transport.os_process import OsProcess, pid_space
from zcactor.workers.orphans import MARK, keep_orphans
from zcactor.workers.run_directory import RunDirectory
from zcactor.workers.zygote import pass_over_user_signals, set_death_signal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import IO

    from zcactor.node.head_state import HeadBootstrap
    from zcactor.node.standby import StandbyBootstrap
    from zcactor.transport.base import Connection

__all__ = ["AGAIN", "SECRETS", "Door", "launch", "main", "raise_descriptor_limit", "search_path", "send_setup"]


class Door:
    """A door that is closed at first.

    Args:
        serve: takes a connection, once the door is open.
    """

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        self._serve = serve
        self._waiting: list[Connection] | None = []

    def accepted(self, connection: Connection) -> None:
        """Take a connection, now or when the door opens."""
        if self._waiting is None:
            self._serve(connection)
        else:
            self._waiting.append(connection)

    def open(self) -> None:
        """Open the door for those who wait and all others. Idempotent."""
        waiting, self._waiting = self._waiting or [], None
        for connection in waiting:
            self._serve(connection)


_BOOTSTRAP = (
    "import sys; sys.path[:] = {path!r}; from zcactor.node.agent_main import main; main({fd}, {lock_fd}, {parent})"
)
SECRETS = ("ZCACTOR_TOKEN",)
"""Variables that actors must not see: other processes of the same user can read the environment of a process."""
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_LENGTH = struct.Struct("<I")
AGENT_ARENA = 1 << 30
"""The limit of bytes of the agent's arena: large messages on their way (a list of 10,000 actors takes 3 MiB). This is
only address space: memory is taken when it is needed."""
_DESCRIPTORS = 1 << 16
"""Descriptors for thousands of actors; not more, because some programs walk through all that they might have."""
AGAIN = 75
"""Exit status of an agent whose launcher is to start it again (``EX_TEMPFAIL`` of sysexits.h)."""
_STAND_BY = -1
"""The result of a head that has lost its term, and waits for the next one."""
_ZYGOTE_END = 2.0
"""Seconds that the zygote gets to end its workers."""


def launch(
    lock_fd: int, output: IO[bytes] | None = None, node: str = "", *, bound: bool = False
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a node agent, or a head, as a child. It waits for `send_setup`, and ends when the returned socket closes.

    The child leads a session of its own: Ctrl-C in the terminal and a signal to the driver's process group reach the
    driver alone, and the agent lives to clean up after it.

    Args:
        lock_fd: descriptor of the run directory's lock; the child inherits it, so that the lock is held as long as
            either process lives.
        output: the file for its output; None shares our standard output and error.
        node: the mark of its processes, and of those they start, in their environment; see `zcactor.workers.orphans`.
            Empty for no mark.
        bound: whether the child also gets SIGTERM when the calling thread ends. The socket alone does not end it where
            forks of this process hold the socket open. Call it from the main thread then.

    Raises:
        OSError: the process could not be started.
        RuntimeError: this interpreter does not know its own executable.
    """
    if not sys.executable:
        raise RuntimeError("zc.init: sys.executable is empty: set it to a Python interpreter for the node agent")
    mark = {MARK: node} if node else {}
    ours, theirs = socket.socketpair()
    with theirs:
        parent = os.getpid() if bound else 0
        code = _BOOTSTRAP.format(path=search_path(), fd=theirs.fileno(), lock_fd=lock_fd, parent=parent)
        try:
            child = subprocess.Popen(
                [sys.executable, *_interpreter_flags(), "-c", code],
                pass_fds=(theirs.fileno(), lock_fd),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**{key: value for key, value in os.environ.items() if key not in SECRETS}, **mark},
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
    return child, ours


def search_path() -> list[str]:
    """This process's import path, made absolute: the node's processes import the same modules as this one."""
    entries: list[object] = list(sys.path)  # programs put anything there; only text counts
    here = working_directory()  # where it was removed, relative entries lead nowhere
    path = [os.path.normpath(os.path.join(here, each)) for each in entries if isinstance(each, str)]
    path = [entry for entry in path if os.path.isabs(entry)]
    if _PACKAGE_PARENT not in path:  # imported in a way of its own
        path.append(_PACKAGE_PARENT)
    return path


def _interpreter_flags() -> list[str]:
    """-X dev, -W and the like, as ``multiprocessing`` passes them on; and -P in a directory that was removed: Python
    3.13.0 cannot import its own modules where the import path has an entry for that."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags if working_directory() else [*flags, "-P"]


def send_setup(sock: socket.socket, setup: Mapping[str, Any]) -> None:
    """Send the agent its setup. The token travels here and never on a command line.

    Args:
        sock: the socket that `launch` returned.
        setup: ``directory``, ``token``, ``agent`` (its process id), ``driver`` (of the program that it belongs to,
            empty for a cluster's), ``head`` (process id and address of the head that it joins; its own id and ``""``
            where it is the head), ``clustered`` (whether the cluster may have other hosts; then a head is no node's
            agent), ``port`` (where it listens for them, 0 for any), ``stays`` (whether it outlives its launcher),
            ``rank`` (of a node of a run, and of the head beside it; otherwise left out or None), ``state`` (the folder
            of a head's log, and whether to begin anew in it; None for a log in memory), ``etcd`` (of a head with a log
            in etcd its URL, whether to begin anew in it, and whether to wait while another head leads), ``record`` (the
            name of its file in the run directory, where it is not its process id), ``kept`` (the path of its record in
            the user's state folder; empty or left out where it has none), ``beside`` (whether a node is
            about to be started beside a head with such a folder), ``config``, ``loop``, ``resources``, ``gpus`` (the
            UUIDs of those it offers), ``cwd``, ``heartbeat``, ``hang_after``, ``follows`` (the id of the node in whose
            place it has started, if any), ``again`` (the code that starts a node in its place, and what that reads;
            see `zcactor.cluster.again`), and ``worker``: further entries for the setup of its workers.
    """
    message = msgspec.msgpack.encode(setup)
    with contextlib.suppress(BrokenPipeError):  # it has failed at its start, which the waiting caller will see
        sock.sendall(_LENGTH.pack(len(message)) + message)


def _receive_setup(sock: socket.socket) -> dict[str, Any] | None:
    """The setup, or None when the driver is gone."""
    with sock.makefile("rb", buffering=0) as file:
        head = file.read(_LENGTH.size)
        if not head or len(head) < _LENGTH.size:
            return None
        left = _LENGTH.unpack(head)[0]
        chunks = []
        while left:
            chunk = file.read(left)
            if not chunk:
                return None
            chunks.append(chunk)
            left -= len(chunk)
    return msgspec.msgpack.decode(b"".join(chunks))  # type: ignore[no-any-return]


def main(fd: int, lock_fd: int, parent: int = 0) -> None:
    """Run the agent. Called in the process that `launch` started; does not return.

    Args:
        fd: descriptor of the socket to the launcher.
        lock_fd: descriptor of the run directory's lock.
        parent: pid of the launcher, with which the agent ends; 0 where only the socket says so.
    """
    open_standard()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a launcher may block SIGCHLD, or SIGTERM
    if parent:
        set_death_signal(signal.SIGTERM)
        if os.getppid() != parent:  # it had ended before
            return
    control = socket.socket(fileno=fd)
    os.set_inheritable(lock_fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pass_over_user_signals()
    import zcactor.node.worker_main  # noqa: F401  # for workers: the zygote shares it with them
    from zcactor.workers import zygote

    with contextlib.suppress(ImportError):
        import uvloop  # noqa: F401
    setup = _receive_setup(control)
    if setup is None:
        _let_go(lock_fd)
        return
    in_a_run = setup.get("rank") is not None
    if in_a_run:
        zygote.outlive_sigterm()
    sys.argv[:] = [""]
    with contextlib.suppress(OSError):
        os.chdir(setup["cwd"])
    raise_descriptor_limit()
    child = None if _is_head_alone(setup) else _fork_zygote(control, lock_fd, setup)
    from zcactor.process.loops import new_event_loop

    zygote.adopt_orphans()
    status = 1
    try:
        loop = new_event_loop(setup["loop"])
        asyncio.set_event_loop(loop)
        end = _STAND_BY
        while end == _STAND_BY:
            end = loop.run_until_complete(_serve(loop, control, None if child is None else child[1], setup))
        status = end
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        if child is not None:
            pid, ours = child
            ours.close()
            _end_zygote(pid)
        zygote.kill_orphans()
        directory = RunDirectory.inherited(Path(setup["directory"]), lock_fd, shared=setup["clustered"])
        _remove_record(directory.path / f"node-{setup.get('record') or setup['agent'].hex()}.json")
        if setup.get("kept"):
            _remove_record(Path(setup["kept"]))
        directory.remove()
        if status == AGAIN and setup["stays"]:
            status = _start_again(setup["again"])
        os._exit(status)


class _Record(msgspec.Struct):
    """The process in a node's record; see `zcactor.cluster.records.NodeFile`."""

    pid: int
    started: int
    space: str = ""


def _remove_record(path: Path) -> None:
    """Remove a node's record where it names this process: a node that was refused has the name of the one that
    lives, and another host may share the folder."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):  # the folder is gone, or was closed
        record = msgspec.json.decode(path.read_bytes(), type=_Record)
        ours = record.space in ("", pid_space())  # in a run directory the space is this one in any case
        if ours and (record.pid, record.started) == OsProcess.of(os.getpid()):
            path.unlink()


def _let_go(lock_fd: int) -> None:
    """Let go of the run directory, and remove it where nobody else holds it: our launcher was killed."""
    directory = RunDirectory.of_lock(lock_fd)
    if directory is not None:
        directory.remove()


def _is_head_alone(setup: Mapping[str, Any]) -> bool:
    """Whether the process is a head without workers."""
    return bool(setup["clustered"] and setup["head"][0] == setup["agent"])


def _fork_zygote(control: socket.socket, lock_fd: int, setup: Mapping[str, Any]) -> tuple[int, socket.socket]:
    """Fork the zygote. Returns its pid, and the socket to it. The zygote itself does not return."""
    from zcactor.workers import zygote

    in_a_run = setup.get("rank") is not None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        for file in (ours, control):
            file.close()
        os.close(lock_fd)
        if in_a_run:
            zygote.outlive_sigterm()
        if setup["clustered"]:  # no program adopts its orphans
            keep_orphans(theirs)
        if in_a_run:
            zygote.outlive_sigterm()
        # A program that starts a node for itself is about to use it. Some nodes of a cluster may never be used.
        zygote.run_zygote(theirs, functools.partial(_prepare, setup), at_once=not setup["clustered"])
        os._exit(0)
    theirs.close()
    return pid, ours


def _start_again(again: Mapping[str, Any]) -> int:
    """Start a process that starts a node with this one's options, as no launcher is left. Returns the exit status."""
    command = [sys.executable, *_interpreter_flags(), "-c", again["code"]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdin is not None
        child.stdin.write(again["data"])
        child.stdin.close()
        return child.wait()


def _prepare(setup: Mapping[str, Any]) -> Callable[[dict[str, Any]], float]:
    """Import, in the zygote, the modules that workers are likely to use, and find out the facts that all of them need.
    Returns the function by which a fork of the zygote becomes a worker."""
    import cloudpickle  # noqa: F401
    import numpy.random  # noqa: F401

    import zcactor.api.inspection  # noqa: F401
    from zcactor.assembly.endpoints import preload
    from zcactor.config import Config
    from zcactor.machine import usable_cpus
    from zcactor.marshal.importable import search_here
    from zcactor.node.numeric_threads import loaded_libraries
    from zcactor.node.worker_main import become_worker
    from zcactor.objectstore.groups import inherited_groups

    Config(**setup["config"])  # finds out the types of all settings
    inherited_groups()
    usable_cpus()
    loaded_libraries()
    preload(setup["config"]["transports"], clustered=setup["clustered"])
    search_here(sys.path)
    return become_worker


def _end_zygote(pid: int) -> None:
    """Wait until the zygote has ended, as it does when its socket closes; kill it after `_ZYGOTE_END` seconds."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    from zcactor.workers.zygote import wait_for_end

    if not wait_for_end(pidfd, _ZYGOTE_END):
        os.kill(pid, signal.SIGKILL)
    os.close(pidfd)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def raise_descriptor_limit() -> None:
    """Raise the limit of descriptors as far as allowed, within reason: a connection takes two, and a worker takes four
    of the agent's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(
    loop: asyncio.AbstractEventLoop, control: socket.socket, zygote: socket.socket | None, setup: dict[str, Any]
) -> int:
    """Run the agent to its end. Returns the exit status, or `_STAND_BY`."""
    from zcactor.assembly.agents import assemble_agent
    from zcactor.assembly.endpoints import (
        address_of,
        find_through,
        hear_of_heads,
        make_endpoint,
        problem_of,
        tell_of_term,
    )
    from zcactor.assembly.process import Process
    from zcactor.config import Config
    from zcactor.control.head import Head
    from zcactor.control.node_agent import NodeAgent
    from zcactor.control.node_table import facts_of, machine_of, own_machine
    from zcactor.errors import ZcactorError
    from zcactor.objectstore.groups import within_limits
    from zcactor.objectstore.store import Store
    from zcactor.process import context
    from zcactor.process.epochs import Deposed
    from zcactor.process.head_outage import HeadGone
    from zcactor.transport.registry import tls_of
    from zcactor.transport.stream.probe import identify

    config = Config(**setup["config"])
    begun: HeadBootstrap | None = None
    standby = None
    if setup.get("etcd"):
        from zcactor.node.standby import StandbyBootstrap  # other nodes do without it, and without aiohttp

        try:
            begun = standby = StandbyBootstrap(
                setup, config, lambda place: _tell(control, f"s{setup['agent'].hex()}@{place}".encode())
            )
            if not await _led(loop, control, standby, setup):
                return 0
        except (ZcactorError, ValueError) as error:
            if setup.get("ready") or (standby is not None and standby.stood):  # the launcher does not listen any more
                logger.error("this head cannot stand by: %s", error)
                return 1
            _tell(control, b"e" + str(error).encode())
            return 0
        except OSError as error:
            _tell(control, f"ecannot listen at {config.host} port {setup['port']}: {error.strerror}".encode())
            return 0
        setup["port"], setup["ready"] = standby.port, True
    store = Store(within_limits(AGENT_ARENA), setup["agent"])
    directory = Path(setup["directory"])
    head, head_address = setup["head"]
    endpoint = make_endpoint(
        config, directory, setup["agent"], setup["token"], store, clustered=setup["clustered"], port=setup["port"]
    )
    process = Process(setup["agent"], "agent", config, loop, store, endpoint)
    process.sessions.head = head
    process.locations.machine = own_machine(config, directory)
    context.set_current(process)
    problem = problem_of(endpoint)
    if problem:
        _tell(control, b"e" + problem.encode())
        return 0
    if setup.get("state"):
        from zcactor.node.head_state import HeadBootstrap  # other nodes do without it

        begun = HeadBootstrap(setup, config)
        try:
            await begun.take()
        except ZcactorError as error:
            _tell(control, b"e" + str(error).encode())
            return 0
    door = Door(process.connections.accepted)
    try:
        await endpoint.start(door.accepted)
    except OSError as error:
        at = f"port {setup['port']}" if setup["port"] or config.ports is None else f"ports {config.ports}"
        _tell(control, b"e" + f"cannot listen at {config.host} {at}: {error.strerror}".encode())
        return 0
    address = address_of(endpoint)
    find_through(endpoint, process.places, process.head, head_address or address)
    if head_address:
        process.head.identify = functools.partial(identify, token=setup["token"], tls=tls_of(config))
    pool = None
    if zygote is not None:
        from zcactor.workers.pool import Pool

        every_worker = {
            **setup["worker"], "directory": setup["directory"], "token": setup["token"], "agent": head,
            "loop": setup["loop"], "config": setup["config"], "node": setup["agent"].hex(),
            "clustered": setup["clustered"], "head_address": head_address or address,
        }  # fmt: skip
        pool = Pool(
            loop, zygote, every_worker,
            output=lambda *a: node.output(*a), ended=lambda w: node.worker_ended(w), lost=lambda: node.zygote_lost(),
        )  # fmt: skip
    facts = facts_of(address, config.transports.split(","), machine_of(directory), gpus=setup["gpus"])
    rank = setup.get("rank")
    if rank is not None:
        facts["rank"] = rank
    if setup.get("follows"):
        facts["follows"] = setup["follows"]
    log = None if begun is None else begun.log
    node = assemble_agent(process, pool, facts, setup["resources"], setup["heartbeat"], setup["hang_after"], log)
    if isinstance(node, NodeAgent):
        hear_of_heads(endpoint, node.watch.summoned)
    if isinstance(node, Head):
        tell_of_term(endpoint, lambda: node.recorder.epoch)
        node.members.identify = functools.partial(identify, token=setup["token"], tls=tls_of(config))
        node.driver = setup["driver"]
        node.console.has_log = not node.driver
        if begun is None:
            await node.recorder.lead()
        else:
            await begun.begin(node, address.partition("@")[2])
    door.open()
    end = node.shutdown if isinstance(node, Head) else node.end_itself

    async def end_in_order(grace: float) -> None:
        if standby is None or not isinstance(node, Head) or not await standby.resign(node):
            await end(grace)

    def told_to_end(grace: float = 0.0) -> None:
        process.tasks.start(end_in_order(grace))

    def launcher_gone() -> None:
        loop.remove_reader(control.fileno())
        if not setup["stays"]:
            told_to_end()

    control.setblocking(False)
    if rank is None:
        loop.add_reader(control.fileno(), launcher_gone)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, told_to_end, 0.0 if setup["driver"] else config.shutdown_timeout)
        if isinstance(node, NodeAgent):  # SIGHUP ends it where it is, as a whole host or cluster ends
            leave = functools.partial(node.leave, config.shutdown_timeout)
            loop.add_signal_handler(signal.SIGTERM, lambda: process.tasks.start(leave()))
    line = reports = None
    if rank is not None:
        from zcactor.node.launcher import LauncherLine  # other nodes do without it

        line = LauncherLine(node, told_to_end)
    try:
        if isinstance(node, NodeAgent):
            await node.join(facts, setup["resources"])
    except ZcactorError as error:
        _tell(control, (b"d" if isinstance(error, Deposed | HeadGone) else b"e") + f"cannot join: {error}".encode())
    else:
        if line is None:
            _tell(control, b"r" + address.encode())
        else:
            line.ready(control, address)
            process.tasks.start(line.serve(control))
        if isinstance(node, Head) and node.driver:
            from zcactor.node.reports import ReportServer  # now, as the program waits no more

            reports = ReportServer(process, node, node.driver, directory)
            await reports.start()
        await node.finished
        if isinstance(node, Head):
            await node.recorder.aclose()
    if reports is not None:
        reports.close()
    await process.close()
    if pool is not None:
        pool.close()
    if standby is not None and standby.again:
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
        loop.remove_reader(control.fileno())
        context.clear_current()
        setup["etcd"] = (setup["etcd"][0], False, True)
        return _STAND_BY
    return AGAIN if isinstance(node, NodeAgent) and node.again else 0


async def _led(
    loop: asyncio.AbstractEventLoop, control: socket.socket, standby: StandbyBootstrap, setup: Mapping[str, Any]
) -> bool:
    """Wait until a head leads. Returns False where it was told to end before, or the cluster has ended."""
    taking = loop.create_task(standby.take())
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, taking.cancel)
    if not setup["stays"]:
        loop.add_reader(control.fileno(), taking.cancel)
    led = False
    try:
        await taking
        led = not standby.is_over
    except asyncio.CancelledError:
        pass
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
        loop.remove_reader(control.fileno())
        if not led:
            await standby.aclose()
    return led


def _tell(control: socket.socket, message: bytes) -> None:
    """Tell the launcher; when the launcher is gone, the reader of its socket notices that as well."""
    with contextlib.suppress(BrokenPipeError):
        control.send(message)
