"""The driver: `zc.init`, `zc.shutdown`, and the embedded node or the cluster behind them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import logging
import os
import secrets
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from zcactor import context, ids
from zcactor.config import TRANSPORTS, Config, load_config
from zcactor.errors import AlreadyInitialized, AuthenticationError, ConnectionLost, NotInitialized, ZcactorError
from zcactor.marshal.importable import search_here
from zcactor.objectstore.groups import default_capacity
from zcactor.objectstore.store import Store
from zcactor.runtime.directory import RunDirectory, base_directory
from zcactor.runtime.endpoints import address_of, find_through, make_endpoint, problem_of, tls_of
from zcactor.runtime.forked import watch_forks
from zcactor.runtime.leaving import RESPONSE
from zcactor.runtime.node import launch, raise_descriptor_limit, search_path, send_setup
from zcactor.runtime.nodes import machine_of, own_machine
from zcactor.runtime.orphans import LastResort
from zcactor.runtime.process import Process
from zcactor.token import default_file, find_token
from zcactor.transport.identify import identify

if TYPE_CHECKING:
    import socket
    from collections.abc import Generator, Mapping, Sequence
    from types import TracebackType

__all__ = ["Node", "init", "shutdown"]

logger = logging.getLogger("zcactor")
_AGENT_WORK = 6.0
"""Seconds that an agent which responds may take beyond the actors' own: killing, reaping, showing the last output; see
its constants."""
_AGENT_END = 3.0
"""Seconds from the agent's last answer, or from the end of its control socket, until it is killed."""
HEARTBEAT, HANG_AFTER = 1.0, 10.0
"""Seconds between two pings of an actor with ``on_hang="kill"``, and until it counts as hung: far above what a busy
machine or a long garbage collection takes, because the actor loses its state."""
_END_PATIENCE = 0.5
"""Seconds after which the end of a program says for what it waits."""
_NAMED = 3
"""Calls that it names."""

_node: Node | None = None
_starting = False


class Node(ABC):
    """What a program has between `init` and `shutdown`: this process's runtime, and a node of its own or a cluster."""

    def __init__(self, config: Config, process: Process, directory: RunDirectory) -> None:
        self.config = config
        self.process = process
        self._directory = directory
        self._shell = _notebook()
        process.use_numpy()
        if self._shell is not None:
            self._shell.events.register("pre_run_cell", self._before_cell)

    def _before_cell(self, _: object) -> None:
        """Each cell of a notebook runs in a context of its own, which knows nothing of the one `init` ran in."""
        self.process.use_numpy()

    @property
    def node_id(self) -> str:
        """Id of the node whose agent knows the actors, 32 hex digits."""
        return self.process.agent.hex()

    async def aclose(self) -> None:
        """End this program's actors, and its node where it has one of its own. Idempotent.

        An agent that does not respond is killed a second after `Config.shutdown_timeout`. Cancelling skips what is
        polite: actors are killed, and all else is still done.
        """
        process = self.process
        process.unseen.close()
        process.tasks.closing = True  # actors end from here on: nobody asks the agent what became of them
        grace = self.config.shutdown_timeout
        ending = asyncio.ensure_future(self._end_actors(grace))
        telling = process.loop.call_later(_END_PATIENCE, self._tell_waiting, grace, asyncio.current_task())
        try:
            await asyncio.wait({ending}, timeout=grace)
            if not ending.done() and await self._responds():
                await asyncio.wait({ending}, timeout=_AGENT_WORK)
            if not ending.done():
                self._give_up()
        finally:
            telling.cancel()
            ending.cancel()
            ending.add_done_callback(_note_failure)
            self._let_go()
            try:
                await process.close()
                await self._ended()
            finally:
                self.end_now()

    def _tell_waiting(self, grace: float, task: asyncio.Task[Any] | None) -> None:
        """Say for what the end of the program waits, and how to have it at once."""
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

    async def _responds(self) -> bool:
        """Whether the node agent, which is late, is at work at all."""
        process = self.process
        try:
            async with asyncio.timeout(RESPONSE):
                await process.requests.ask(await process.connections.connect(process.agent), "ping")
        except (TimeoutError, ZcactorError):
            return False
        return True

    @abstractmethod
    async def _end_actors(self, grace: float) -> None:
        """Have the actors ended, idle ones in order within `grace` seconds."""

    @abstractmethod
    def _give_up(self) -> None:
        """The node agent does not respond."""

    @abstractmethod
    async def _ended(self) -> None:
        """Wait for whatever ends by itself once `_let_go` was called."""

    def _let_go(self) -> None:
        context.clear_current()
        self.process.tasks.closing = True
        shell, self._shell = self._shell, None
        if shell is not None:
            shell.events.unregister("pre_run_cell", self._before_cell)

    def end_now(self) -> None:
        """The same without an event loop: at the interpreter's exit, or when the loop has been closed. Idempotent."""
        self._let_go()
        self._directory.remove()
        self.process.trimmer.abandon()
        self.process.end_leases()
        self.process.store.close()

    def forget(self) -> None:
        """In the child of a fork: let go of what tells others, by being closed, that the parent has ended."""
        self._directory.forget()


class EmbeddedNode(Node):
    """A node that is the program's own: its agent is our child."""

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
        if not self.process.tasks.closing:  # it was killed, and its zygote may have been as well
            self.process.tasks.start(asyncio.to_thread(self._last_resort.end))

    async def _end_actors(self, grace: float) -> None:
        await self.process.head.ask_agent("shutdown", grace)

    def _give_up(self) -> None:
        logger.warning("the node agent, pid %d, does not end and is killed", self._agent.pid)
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _ended(self) -> None:
        try:
            async with asyncio.timeout(_AGENT_END):
                await asyncio.shield(self._gone)
        except TimeoutError:
            self._give_up()

    def _let_go(self) -> None:
        super()._let_go()
        self._control.close()  # the agent ends on this, whatever else went wrong

    def end_now(self) -> None:
        """See `Node.end_now`."""
        self._let_go()
        _end_agent(self._agent)
        if self._pidfd >= 0:
            if not self.process.loop.is_closed():
                self.process.loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._last_resort.end()
        self._last_resort.close()
        super().end_now()

    def forget(self) -> None:
        """See `Node.forget`."""
        super().forget()
        self._control.close()
        os.close(self._pidfd)
        self._agent.returncode = 0  # not this process's child: nothing to wait for


class JoinedCluster(Node):
    """A cluster that others have started."""

    def __init__(self, config: Config, process: Process, directory: RunDirectory, address: str) -> None:
        super().__init__(config, process, directory)
        self._address = address

    def __repr__(self) -> str:
        return f"<zcactor cluster at {self._address}, head {self.node_id[:8]}>"

    async def _end_actors(self, grace: float) -> None:
        await self.process.head.ask_members("leave_driver", grace)

    def _give_up(self) -> None:
        """The cluster's head notices that we are gone."""

    async def _ended(self) -> None:
        """There is nothing of ours to wait for."""


def _notebook() -> Any:
    """IPython's shell, when this is a notebook or an IPython prompt; else None."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def _note_failure(ending: asyncio.Future[None]) -> None:
    if ending.cancelled():
        logger.debug("the node agent did not answer the request to end the actors in time")
    elif (error := ending.exception()) is not None:
        logger.debug("the node agent did not end the actors: %s", error)


def _end_agent(agent: subprocess.Popen[bytes]) -> None:
    """Reap the agent, which has been told to end; kill it when it does not."""
    try:
        agent.wait(_AGENT_END)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


class Init:
    """What `init` returns: await it, or use it with ``async with``."""

    def __init__(self, arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._extra = extra

    def __await__(self) -> Generator[Any, None, Node]:
        return _start(self._arguments, self._extra).__await__()

    async def __aenter__(self) -> Node:
        return await self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _node is not None:
            await shutdown()

    def __enter__(self) -> Self:
        raise TypeError("zc.init() is asynchronous: use 'async with zc.init():' or 'await zc.init()'")

    def __exit__(self, *_: object) -> None: ...


def init(
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    resources: Mapping[str, float] = {},
    store_capacity: int | None = None,
    token: str | None = None,
    transports: Sequence[str] | None = None,
    require: str | None = None,
    tls: str | None = None,
    namespace: str | None = None,
    log_to_driver: bool | None = None,
    config: Config | None = None,
) -> Init:
    """Start the runtime: ``async with zc.init():`` around a program, or ``await zc.init()`` and later
    ``zc.shutdown()``.

    Without `address` an embedded node starts, on this host, with nothing else running; it ends with this process
    however that ends. The arena of this process is created, its node agent is started, and from then on actors can be
    spawned.

    Args:
        address: ``"host:port"`` of a running cluster to join as a driver.
        num_cpus: CPUs that actors may reserve; default the machine's.
        num_gpus: GPUs that actors may reserve; default those found.
        resources: amounts of custom resources, by name.
        store_capacity: bytes; bounds the arena of each process. Default 30 % of memory, the
            machine's or what control groups allow.
        token: the cluster's secret, 64 hexadecimal digits; without it those of ``ZCACTOR_TOKEN_FILE``,
            ``ZCACTOR_TOKEN`` or the user's token file are taken. An embedded node makes its own.
        transports: which to allow and in which order, of ``"local"``, ``"verbs"``, ``"tcp"``.
        require: ``"verbs"`` or ``"tcp"``: whoever is reached on another host in another way is not reached at all, and
            a fallback is an error.
        tls: path of the folder with this host's certificate, for connections to other hosts; see `Config`.
        namespace: where names of actors are looked up by default; default ``"default"``.
        log_to_driver: show here what actors print; default True.
        config: all further settings; the arguments above override it.

    Raises, when awaited:
        AlreadyInitialized: the runtime is running in this process.
        TypeError, ValueError: a setting is wrong, here, in the environment or in a file; the message names the source.
        ConnectionLost: nobody answers at `address`, or what answers takes no programs.
        AuthenticationError: there is no token, it is not that cluster's, or the file it is in can be read by others;
            likewise certificates.
        VersionMismatch: the cluster speaks another protocol or Python version.

    Cancelling an ``await zc.init()`` ends what had been started.
    """
    if isinstance(transports, str) or not all(isinstance(name, str) for name in transports or ()):
        raise TypeError(f"zc.init: transports is a sequence of names, such as ('verbs', 'tcp'), not {transports!r}")
    for name in transports or ():
        if name not in TRANSPORTS:
            raise ValueError(f"zc.init: unknown transport {name!r}; valid ones: {', '.join(TRANSPORTS)}")
    given: Mapping[Any, Any] = resources
    for key, amount in given.items():
        if not isinstance(key, str) or isinstance(amount, bool) or not isinstance(amount, int | float) or amount < 0:
            raise TypeError(f"zc.init: resources maps names to amounts >= 0, got {key!r}: {amount!r}")
        if key in ("CPU", "GPU"):
            raise ValueError(f"zc.init: give {key} by num_{key.lower()}s, not in resources")
    named = {
        "address": address, "num_cpus": num_cpus, "num_gpus": num_gpus, "store_capacity": store_capacity,
        "namespace": namespace, "log_to_driver": log_to_driver, "require": require, "tls": tls,
        "transports": None if transports is None else ",".join(transports),
    }  # fmt: skip
    if config is not None:
        named = {**asdict(config), **{key: value for key, value in named.items() if value is not None}}
    if token is not None and not isinstance(token, str):
        raise TypeError(f"zc.init: token must be a str, not {type(token).__name__}")
    counted = num_cpus is not None or num_gpus is not None
    return Init(named, {"resources": dict(resources), "counted": counted, "token": token})


async def _start(arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> Node:
    global _node, _starting
    if _node is not None and _node.process.loop.is_closed():  # its program ended without a shutdown
        _node.end_now()
        _node = None
    if _node is not None or _starting:
        raise AlreadyInitialized("zc.init was called before in this process; call 'await zc.shutdown()' first")
    if context.current_or_none() is not None:
        raise AlreadyInitialized(
            "zc.init: this is an actor's process, which belongs to a node already; just spawn actors"
        )
    config, sources = load_config(arguments)
    _starting = True
    try:
        if config.address is None:
            _node = await _start_node(config, extra["resources"])
        else:
            if extra["resources"] or extra["counted"]:
                raise ValueError(
                    "zc.init: num_cpus, num_gpus and resources are a node's, and a program that joins a cluster at "
                    f"{config.address} brings none; give them to zcactor start"
                )
            # A `Config` that was passed has all fields, so its default does not tell that somebody has chosen it.
            own_host = config.host != Config().host or sources["host"] not in ("default", "argument")
            _node = await _join(config, extra["token"], own_host=own_host)
    finally:
        _starting = False
    return _node


async def _start_node(config: Config, resources: Mapping[str, float]) -> Node:
    raise_descriptor_limit()
    watch_forks()
    with contextlib.ExitStack() as undo:
        directory = RunDirectory(base_directory())
        undo.callback(directory.remove)
        driver, agent_id = ids.token(), ids.token()
        last_resort = LastResort(agent_id.hex())
        undo.callback(last_resort.close)
        undo.callback(last_resort.end)
        agent, control = launch(directory.lock_fd, node=agent_id.hex())
        undo.callback(_end_agent, agent)
        undo.callback(control.close)
        loop = asyncio.get_running_loop()
        secret = secrets.token_bytes(32)
        capacity = config.store_capacity or default_capacity()
        send_setup(
            control,
            {
                "directory": str(directory.path), "token": secret, "agent": agent_id, "driver": driver,
                "loop": config.loop, "config": asdict(config), "resources": resources_of(config, resources),
                "cwd": os.getcwd(), "heartbeat": HEARTBEAT, "hang_after": HANG_AFTER, "head": (agent_id, ""),
                "clustered": False, "port": 0, "stays": False,
                "worker": {"store_capacity": capacity, "namespace": config.namespace},
            },
        )  # fmt: skip
        store = Store(capacity, driver)
        undo.callback(store.close)
        endpoint = make_endpoint(config, directory.path, driver, secret, store)
        process = Process(driver, "driver", config, loop, store, endpoint)
        process.sessions.head = agent_id
        process.locations.machine = own_machine(config, directory.path)
        process.system.print_log = _print_log
        try:
            await endpoint.start(process.connections.accepted)
            await _agent_is_ready(loop, control, agent, config.spawn_timeout)
            await process.connections.connect(agent_id)
        except BaseException:
            control.close()
            await process.close()
            raise
        undo.pop_all()
    search_here(search_path())
    context.set_current(process)
    return EmbeddedNode(config, process, directory, agent, control, last_resort)


async def _join(config: Config, argument: str | None, *, own_host: bool) -> Node:
    """Join the cluster whose head listens at `config.address`.

    Args:
        config: the settings.
        argument: the token that the program gave, if any.
        own_host: whether `config.host` was said by anybody; otherwise it is the address that leads to the head.
    """
    address = config.address
    assert address is not None
    found = find_token(argument, os.environ)
    if found is None:
        raise AuthenticationError(
            f"to join {address} the cluster's token is needed: copy {default_file(os.environ)} from the head's host, "
            "or set ZCACTOR_TOKEN_FILE or ZCACTOR_TOKEN, or pass token="
        )
    token, _ = found
    head = await identify(address, token, tls_of(config))
    if not own_host:
        config = replace(config, host=head.ours)
    raise_descriptor_limit()
    watch_forks()
    with contextlib.ExitStack() as undo:
        directory = RunDirectory.shared(base_directory(), head.process.hex())
        undo.callback(directory.remove)
        loop = asyncio.get_running_loop()
        driver = ids.token()
        store = Store(config.store_capacity or default_capacity(), driver)
        undo.callback(store.close)
        endpoint = make_endpoint(config, directory.path, driver, token, store, clustered=True)
        problem = problem_of(endpoint)
        if problem:
            raise ConnectionLost(f"zc.init: {address} cannot be joined: {problem}")
        process = Process(driver, "driver", config, loop, store, endpoint)
        process.sessions.head = head.process
        process.locations.machine = own_machine(config, directory.path)
        process.system.print_log = _print_log
        find_through(endpoint, process.head, head.address)
        context.set_current(process)  # the answers to what is asked below are opened in it
        try:
            await endpoint.start(process.connections.accepted)
            await process.head.ask_members("join_driver", address_of(endpoint), machine_of(directory.path))
        except BaseException:
            context.clear_current()
            await process.close()
            raise
        undo.pop_all()
    search_here(search_path())
    return JoinedCluster(config, process, directory, address)


async def _agent_is_ready(
    loop: asyncio.AbstractEventLoop,
    control: socket.socket,
    agent: subprocess.Popen[bytes],
    timeout: float,
) -> None:
    control.setblocking(False)
    try:
        async with asyncio.timeout(timeout):
            if await loop.sock_recv(control, 1) == b"r":
                return
    except TimeoutError:
        raise ConnectionLost(f"the node agent did not start within {timeout:g} s (spawn_timeout)") from None
    except ConnectionResetError:  # it ended before it had read all that it was told
        pass
    _end_agent(agent)
    raise ConnectionLost(
        f"the node agent ended at its start with status {agent.returncode}; its own error is printed above"
    )


async def shutdown() -> None:
    """End every actor, the node and this process's runtime. Arrays that were received stay valid.

    Raises:
        NotInitialized: there is nothing to shut down.

    Cancelling it still ends everything, only less politely.
    """
    global _node
    if _node is None:
        raise NotInitialized("zc.shutdown: the runtime is not running in this process")
    node, _node = _node, None
    if node.process.loop is not asyncio.get_running_loop():
        node.end_now()  # its own loop cannot be used from here
        return
    await node.aclose()


def resources_of(config: Config, custom: Mapping[str, float]) -> dict[str, float]:
    """What a node has: amounts by name, those of `config` or else what the machine has, and `custom` ones."""
    gpus = config.num_gpus if config.num_gpus is not None else len(list(Path("/dev").glob("nvidia[0-9]*")))
    total = {"CPU": float(config.num_cpus if config.num_cpus is not None else len(os.sched_getaffinity(0))), **custom}
    if gpus:
        total["GPU"] = float(gpus)
    return total


def _print_log(stream: str, text: str) -> None:
    """Actors' output, to whatever ``sys.stdout`` is now (a notebook's, a test's capture).

    A notebook shows output at the cell of the context that printed it. Ours is that of the cell that called `init`,
    so we print in an empty one, which stands for the cell that runs now.
    """
    contextvars.Context().run(_write, sys.stderr if stream == "stderr" else sys.stdout, text)


def _write(file: TextIO | None, text: str) -> None:
    if file is None:
        return
    try:
        file.write(text)
    except UnicodeEncodeError:  # a standard output that is not UTF-8
        encoding = getattr(file, "encoding", None) or "ascii"
        file.write(text.encode(encoding, "backslashreplace").decode(encoding))
    file.flush()


def _after_fork() -> None:
    """In the child: the node is the parent's."""
    global _node
    if _node is not None:
        _node.forget()
        _node = None


def _at_exit() -> None:
    """The program ends without `shutdown`: leave nothing behind."""
    global _node
    if _node is not None:
        node, _node = _node, None
        node.end_now()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
