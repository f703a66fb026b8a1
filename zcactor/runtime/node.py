"""The node agent's process: how a driver launches it, and its main function."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["launch", "main", "send_setup"]

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_BOOTSTRAP = "import sys; sys.path.insert(0, {path!r}); from zcactor.runtime.node import main; main({fd})"
_LENGTH = struct.Struct("<I")
AGENT_ARENA = 1 << 20
"""Bytes of the agent's arena: it keeps no arrays, only large recipes on their way."""


def launch(lock_fd: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a node agent as a child. It waits for `send_setup`, and ends when the returned socket closes.

    The child leads a session of its own: Ctrl-C in the terminal and a signal to the driver's process group reach the
    driver alone, and the agent lives to clean up after it.

    Args:
        lock_fd: descriptor of the run directory's lock, inherited so that the lock is held as long as either lives.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(  # noqa: S603 - our own interpreter and code
            [sys.executable, *_interpreter_flags(), "-c", _BOOTSTRAP.format(path=_PACKAGE_PARENT, fd=theirs.fileno())],
            pass_fds=(theirs.fileno(), lock_fd),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return child, ours


def _interpreter_flags() -> list[str]:
    """-X dev, -W and the like, as ``multiprocessing`` passes them on."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined,no-any-return]  # noqa: SLF001


def send_setup(sock: socket.socket, setup: Mapping[str, Any]) -> None:
    """Tell the agent what to be. The token travels here and never on a command line."""
    message = msgspec.msgpack.encode(setup)
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


def main(fd: int) -> None:
    """Run the agent. Called in the process that `launch` started."""
    control = socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Everything the zygote is to have imported; the agent needs most of it too.
    import numpy  # noqa: ICN001, F401

    from zcactor.runtime import agent, pool, zygote
    from zcactor.runtime import worker as worker_module

    with contextlib.suppress(ImportError):
        import uvloop  # noqa: F401
    import cloudpickle  # noqa: F401

    del agent, pool
    setup = _receive_setup(control)
    if setup is None:
        return
    sys.path[:] = setup["sys_path"]
    sys.argv[:] = [""]
    with contextlib.suppress(OSError):
        os.chdir(setup["cwd"])
    _raise_descriptor_limit()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        control.close()
        zygote.run_zygote(theirs, worker_module.become_worker)
        os._exit(0)
    theirs.close()
    from zcactor.runtime.loops import new_event_loop

    loop = new_event_loop(setup["loop"])
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(_serve(loop, control, ours, setup))
    finally:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        shutil.rmtree(setup["directory"], ignore_errors=True)


def _raise_descriptor_limit() -> None:
    """As many descriptors as we may have: each worker takes the agent four."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(loop: asyncio.AbstractEventLoop, control: socket.socket, zygote: socket.socket, setup: dict[str, Any]) -> None:
    from zcactor import context
    from zcactor.config import Config
    from zcactor.objectstore.store import Store
    from zcactor.runtime.agent import NodeAgent
    from zcactor.runtime.pool import Pool
    from zcactor.runtime.process import AGENT_INDEX, Process
    from zcactor.transport.local import LocalEndpoint

    config = Config(**setup["config"])
    store = Store(AGENT_ARENA, setup["agent"])
    endpoint = LocalEndpoint(
        Path(setup["directory"]), setup["agent"], setup["token"], store.arena.fd, store.arena.nbytes,
        config.recv_depth, config.eager_limit,
    )  # fmt: skip
    process = Process(setup["agent"], "agent", config, loop, store, endpoint)
    context.set_current(process)
    pool = Pool(
        loop, zygote, {**setup["worker"], "directory": setup["directory"], "token": setup["token"], "agent": setup["agent"],
                       "loop": setup["loop"], "config": setup["config"], "node": setup["agent"].hex()},
        output=lambda *a: node.output(*a), ended=lambda w: node.worker_ended(w), lost=lambda: finish(),
    )  # fmt: skip
    node = NodeAgent(process, pool, setup["resources"])
    node.driver = setup["driver"]
    process.add_host(AGENT_INDEX, NodeAgent, "node agent", {"max_concurrency": 1 << 20}).adopt(node)

    def finish() -> None:
        if not node.finished.done():
            node.finished.set_result(None)

    def driver_gone() -> None:
        loop.remove_reader(control.fileno())
        process.start_task(node.shutdown(0.0))

    control.setblocking(False)
    loop.add_reader(control.fileno(), driver_gone)
    await endpoint.start(process.accepted)
    control.send(b"r")
    await node.finished
    await process.close()
    pool.close()
