"""The driver: `zc.init`, `zc.shutdown`, and the embedded node behind them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from zcactor import context
from zcactor.config import Config, load_config
from zcactor.errors import AlreadyInitialized, ConnectionLost, NotInitialized, ZcactorError
from zcactor.objectstore.store import Store
from zcactor.runtime.node import launch, send_setup
from zcactor.runtime.process import Process
from zcactor.transport.local import LocalEndpoint

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Node", "init", "shutdown"]

logger = logging.getLogger("zcactor")
_PREFIX = f"zcactor-{os.getuid()}-"
_STALE_AFTER = 60.0
"""Seconds before a run directory without a living owner is removed: longer than any start takes."""
_PAGE = 4096

_node: Node | None = None


class Node:
    """The embedded node of a driver: its run directory, its agent's process, and this process's runtime."""

    def __init__(self, config: Config, process: Process, agent: subprocess.Popen[bytes], control: socket.socket, directory: Path, lock_fd: int) -> None:
        self.config = config
        self.process = process
        self._agent = agent
        self._control = control
        self._directory = directory
        self._lock_fd = lock_fd

    @property
    def node_id(self) -> str:
        """Id of the node, 32 hex digits."""
        return self.process.agent.hex()

    def __repr__(self) -> str:
        return f"<zcactor node {self.node_id[:8]}, agent pid {self._agent.pid}>"

    async def aclose(self) -> None:
        """End every actor and the agent; remove the run directory."""
        process = self.process
        grace = self.config.shutdown_timeout
        try:
            async with asyncio.timeout(grace + 3):
                await process.ask_agent("shutdown", grace)
        except (TimeoutError, ZcactorError) as error:
            logger.debug("the node agent did not answer the request to shut down: %s", error)
        finally:
            self._finish_now()
            await process.close()
            await self._reap()

    def _finish_now(self) -> None:
        context.clear_current()
        self.process.closing = True
        self._control.close()  # the agent ends on this, whatever else went wrong

    async def _reap(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(5):
                await loop.run_in_executor(None, self._agent.wait, 5)
        except (TimeoutError, subprocess.TimeoutExpired):
            self._agent.kill()
            self._agent.wait()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._lock_fd)


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
    resources: Mapping[str, float] = {},  # noqa: B006 - never changed
    store_capacity: int | None = None,
    token: str | None = None,
    transports: Sequence[str] | None = None,
    namespace: str | None = None,
    log_to_driver: bool | None = None,
    config: Config | None = None,
) -> Init:
    """Start the runtime: ``async with zc.init():`` around a program, or ``await zc.init()`` and later ``zc.shutdown()``.

    Without `address` an embedded node starts, on this host, with nothing else running; it ends with this process however
    that ends. The arena of this process is created, its node agent is started, and from then on actors can be spawned.

    Args:
        address: ``"host:port"`` of a running cluster to join as a driver.
        num_cpus: CPUs that actors may reserve; default the machine's.
        num_gpus: GPUs that actors may reserve; default those found.
        resources: amounts of custom resources, by name.
        store_capacity: bytes; bounds the arena of each process. Default 30 % of memory.
        token: the cluster's secret; an embedded node makes its own.
        transports: which to allow and in which order, of ``"local"``, ``"verbs"``, ``"tcp"``.
        namespace: where names of actors are looked up by default; default ``"default"``.
        log_to_driver: show here what actors print; default True.
        config: all further settings; the arguments above override it.

    Raises, when awaited:
        AlreadyInitialized: the runtime is running in this process.
        TypeError, ValueError: a setting is wrong, here, in the environment or in a file; the message names the source.

    Cancelling an ``await zc.init()`` ends what had been started.
    """
    known = ("local", "verbs", "tcp")
    for name in transports or ():
        if name not in known:
            raise ValueError(f"zc.init: unknown transport {name!r}; valid ones: {', '.join(known)}")
    if transports is not None and "local" not in transports:
        raise ValueError("zc.init: an embedded node runs on one host and needs the transport 'local'")
    for key, amount in resources.items():
        if not isinstance(key, str) or isinstance(amount, bool) or not isinstance(amount, int | float) or amount < 0:
            raise TypeError(f"zc.init: resources maps names to amounts >= 0, got {key!r}: {amount!r}")
        if key in ("CPU", "GPU"):
            raise ValueError(f"zc.init: give {key} by num_{key.lower()}s, not in resources")
    named = {
        "address": address, "num_cpus": num_cpus, "num_gpus": num_gpus, "store_capacity": store_capacity,
        "namespace": namespace, "log_to_driver": log_to_driver,
    }  # fmt: skip
    if config is not None:
        named = {**asdict(config), **{key: value for key, value in named.items() if value is not None}}
    if token is not None and not isinstance(token, str):
        raise TypeError(f"zc.init: token must be a str, not {type(token).__name__}")
    return Init(named, {"resources": dict(resources), "token": token})


async def _start(arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> Node:
    global _node  # noqa: PLW0603 - what `shutdown` ends
    if _node is not None or context.current_or_none() is not None:
        raise AlreadyInitialized("zc.init was called before in this process; call 'await zc.shutdown()' first")
    config, _ = load_config(arguments)
    if config.address is not None:
        raise ConnectionLost(
            f"address {config.address!r}: this version runs embedded nodes only and cannot join a cluster; leave the "
            "address (and ZCACTOR_ADDRESS) out"
        )
    directory, lock_fd = _make_directory()
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, lock_fd)
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
        agent, control = launch(lock_fd)
        undo.callback(agent.wait)
        undo.callback(control.close)
        loop = asyncio.get_running_loop()
        driver, agent_id = secrets.token_bytes(16), secrets.token_bytes(16)
        secret = secrets.token_bytes(32)
        capacity = config.store_capacity or _default_capacity()
        plain = {key: value for key, value in asdict(config).items()}
        send_setup(
            control,
            {
                "directory": str(directory), "token": secret, "agent": agent_id, "driver": driver, "loop": _kind_of(loop),
                "config": plain, "resources": _resources(config, extra["resources"]), "sys_path": _search_path(),
                "cwd": os.getcwd(), "worker": {"store_capacity": capacity, "namespace": config.namespace},
            },
        )  # fmt: skip
        store = Store(capacity, driver)
        endpoint = LocalEndpoint(
            directory, driver, secret, store.arena.fd, store.arena.nbytes, config.recv_depth, config.eager_limit
        )
        process = Process(driver, "driver", config, loop, store, endpoint)
        process.agent = agent_id
        process.system.print_log = _print_log
        await endpoint.start(process.accepted)
        try:
            await _agent_is_ready(loop, control, agent, config.spawn_timeout)
            await process.connect(agent_id)
        except BaseException:
            await process.close()
            raise
        undo.pop_all()
    context.set_current(process)
    _node = Node(config, process, agent, control, directory, lock_fd)
    return _node


async def _agent_is_ready(
    loop: asyncio.AbstractEventLoop, control: socket.socket, agent: subprocess.Popen[bytes], timeout: float  # noqa: ASYNC109
) -> None:
    control.setblocking(False)
    try:
        async with asyncio.timeout(timeout):
            if await loop.sock_recv(control, 1) == b"r":
                return
    except TimeoutError:
        raise ConnectionLost(f"the node agent did not start within {timeout:g} s (spawn_timeout)") from None
    status = agent.wait()
    raise ConnectionLost(f"the node agent ended at its start with status {status}; its own error is printed above")


async def shutdown() -> None:
    """End every actor, the node and this process's runtime. Arrays that were received stay valid.

    Raises:
        NotInitialized: there is nothing to shut down.

    Cancelling it still ends everything, only less politely.
    """
    global _node  # noqa: PLW0603
    if _node is None:
        raise NotInitialized("zc.shutdown: the runtime is not running in this process")
    node, _node = _node, None
    await node.aclose()


def _make_directory() -> tuple[Path, int]:
    """A fresh private run directory, locked for as long as its owner or its agent lives."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    _sweep(base)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))  # mode 0700
    lock_fd = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return directory, lock_fd


def _sweep(base: Path) -> None:
    """Remove run directories that were left when a whole control group was killed at once."""
    for directory in base.glob(f"{_PREFIX}*"):
        try:
            if time.time() - directory.stat().st_mtime < _STALE_AFTER or directory.stat().st_uid != os.getuid():
                continue
            fd = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its owner lives
        else:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(fd)


def _default_capacity() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(memory * 0.3) // _PAGE * _PAGE


def _resources(config: Config, custom: Mapping[str, float]) -> dict[str, float]:
    gpus = config.num_gpus if config.num_gpus is not None else len(list(Path("/dev").glob("nvidia[0-9]*")))
    total = {"CPU": float(config.num_cpus if config.num_cpus is not None else os.cpu_count() or 1), **custom}
    if gpus:
        total["GPU"] = float(gpus)
    return total


def _search_path() -> list[str]:
    """This process's import path, made absolute: workers import what the driver can."""
    return [str(Path(entry).absolute()) if not os.path.isabs(entry) else entry for entry in sys.path]  # noqa: PTH117


def _kind_of(loop: asyncio.AbstractEventLoop) -> str:
    return "uvloop" if type(loop).__module__.startswith("uvloop") else "asyncio"


def _print_log(stream: str, text: str) -> None:
    """Actors' output, to whatever ``sys.stdout`` is now (a notebook's, a test's capture)."""
    file = sys.stderr if stream == "stderr" else sys.stdout
    if file is not None:
        file.write(text)
        file.flush()


def _after_fork() -> None:
    process = context.current_or_none()
    if process is not None:
        process.abandon()
        context.mark_forked(os.getppid())


os.register_at_fork(after_in_child=_after_fork)
