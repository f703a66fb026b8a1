"""The driver: `zc.init`, `zc.shutdown`, and the embedded node or the cluster behind them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import secrets
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Unpack

from zcactor import ids
from zcactor.api.operation import Background, refuse_to_block
from zcactor.api.unawaited import Unawaited
from zcactor.assembly.devices import offered_gpus
from zcactor.assembly.fork_guard import watch_forks
from zcactor.config import TRANSPORTS, Config, FurtherSettings, load_config, unknown_setting
from zcactor.driver.runtimes import EmbeddedRuntime, Runtime, end_agent
from zcactor.errors import AlreadyInitialized, ConnectionLost, NotInitialized
from zcactor.exception_pickling import hides, shown_class
from zcactor.folders import working_directory
from zcactor.machine import check_calls, usable_cpus
from zcactor.marshal.importable import search_here
from zcactor.node.agent_main import launch, raise_descriptor_limit, search_path, send_setup
from zcactor.objectstore.groups import default_capacity
from zcactor.objectstore.store import Store
from zcactor.options import check_can_be_sent, checked_seconds
from zcactor.process import context
from zcactor.process.loops import LoopThread, chosen_loop, loop_name
from zcactor.process.uncaught import present
from zcactor.standard import open_standard
from zcactor.workers.orphans import LastResort
from zcactor.workers.run_directory import RunDirectory, base_directory

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Generator, Mapping, Sequence
    from types import TracebackType

    from zcactor.api.operation import Operation
    from zcactor.objectstore.checking import Checker

__tracebackhide__ = hides
__all__ = ["HANG_AFTER", "HEARTBEAT", "adopt", "check_free", "init", "resources_of", "shutdown"]

HEARTBEAT, HANG_AFTER = 1.0, 10.0
"""Seconds between two pings of an actor with ``on_hang="kill"``, and seconds without an answer after which the actor
counts as hung: far above the time of a busy machine or a long garbage collection, because the actor loses its state."""
_LEAVE = 10.0
"""Seconds that the loop's thread of a program gets to leave at its exit."""
_WORD = 4096
"""Bytes of the agent's word on its start, at most."""
_runtime: Runtime | None = None
_starting = False


class Init(Unawaited):
    """The result of `init`: await it, or use it with ``async with``. A program without an event loop uses ``with``, or
    asks for its `result`."""

    def __init__(self, arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._extra = extra
        self._used = False

    def _advice(self) -> str:
        return (
            "zc.init() has started nothing yet: write 'with zc.init():' or 'zc.init().result()' in a plain script, and "
            "'async with zc.init():' or 'await zc.init()' in the async main of zc.run(main()), in a notebook or at the "
            "prompt of python -m asyncio"
        )

    def __repr__(self) -> str:
        return f"<{self._advice()}>"

    def __del__(self) -> None:
        if not self._used:
            warnings.warn(self._advice(), RuntimeWarning, stacklevel=2)

    def __await__(self) -> Generator[Any, None, Runtime]:
        self._used = True
        return _start(self._arguments, self._extra).__await__()

    async def __aenter__(self) -> Runtime:
        return await self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _runtime is not None:
            checker = await _end(_runtime, again=kind is not None and issubclass(kind, KeyboardInterrupt))
            if checker is not None and error is None:
                checker.raise_found()

    def result(self, timeout: float | None = None) -> Runtime:
        """Start the runtime on an event loop in a thread of its own, and block until it is ready. From then on NumPy
        allocates in the store in this thread, too.

        Args:
            timeout: seconds to wait at most; None waits for ever.

        Raises:
            RuntimeError: the calling thread runs an event loop. Nothing was started.
            TimeoutError: the runtime was not ready in time. All that was started has ended.
            TypeError: `timeout` is no number.
            ValueError: `timeout` is negative, or not a number (NaN).
            Exception: the errors of ``await``.

        Ctrl-C ends all that was started.
        """
        return self._block(checked_seconds(timeout, "result()"), "zc.init().result()", "write 'await zc.init()'")

    def __enter__(self) -> Runtime:
        return self._block(None, "'with zc.init():'", "write 'async with zc.init():'")

    def _block(self, timeout: float | None, what: str, instead: str) -> Runtime:
        global _runtime
        self._used = True
        refuse_to_block(what, instead)
        open_standard()  # before the loop opens descriptors
        check_calls()  # uvloop ends the process without a reason where it lacks one
        thread = LoopThread(loop_name())
        try:
            runtime = thread.run(_start(self._arguments, self._extra), timeout)
            runtime.thread = thread
            runtime.process.use_numpy()
        except BaseException as error:
            thread.end()
            thread.join()
            if _runtime is not None and _runtime.process.loop is thread.loop:  # it was ready nevertheless
                _runtime.end_now()
                _runtime = None
            if type(error) is TimeoutError and not error.args:
                raise TimeoutError(f"zc.init() was not ready after {timeout:.6g} s, and was ended") from None
            present(error)  # which may end the program
            raise
        return runtime

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            present(error)  # which may end the program
        if _runtime is None or _runtime.thread is None:
            return
        thread = _runtime.thread
        try:  # where Ctrl-C comes meanwhile, actors are killed
            checker = thread.run(_end(_runtime))
        finally:
            thread.end()
            thread.join()
        if checker is not None and error is None:
            checker.raise_found()


def init(
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    resources: Mapping[str, float] = {},
    store_capacity: int | str | None = None,
    token: str | None = None,
    transports: Sequence[str] | None = None,
    security: str | None = None,
    namespace: str | None = None,
    log_to_driver: bool | None = None,
    config: Config | None = None,
    **settings: Unpack[FurtherSettings],
) -> Init:
    """Start the runtime: ``async with zc.init():``, or ``await zc.init()`` and later ``await zc.shutdown()``. Without
    an event loop: ``with zc.init():``, or ``zc.init().result()`` and later ``zc.shutdown().result()``.

    Without `address` an embedded node starts on this host, and needs no other service. It ends with this process, also
    when the process crashes or is killed. `init` creates the arena of this process and starts the node agent; then the
    program can spawn actors.

    Args:
        address: ``"host:port"`` of the head of a running cluster, which the program joins as a driver; several of them
            with commas between them, any of which may be a standby's; or the ``etcd://`` URL of its heads. With no
            address here or in the settings, an embedded node starts.
        num_cpus: number of CPUs that actors may reserve; default the CPUs that this process may use, by its
            affinity and the quota of its control groups. For an embedded node only.
        num_gpus: number of GPUs that actors may reserve; default the GPUs that this process sees. For an embedded node
            only.
        resources: amounts of custom resources, by name, each at least 0. For an embedded node only.
        store_capacity: bytes, or a size such as ``"1GiB"``; bounds the arena of each process. Default 30 % of the
            memory of the machine, or of the memory that control groups allow.
        token: the cluster's secret, 64 hexadecimal digits; the default is the token in ``ZCACTOR_TOKEN_FILE``,
            ``ZCACTOR_TOKEN`` or the user's token file. An embedded node makes its own.
        transports: allowed transports in the order of preference, of ``"local"``, ``"verbs"``, ``"tcp"``.
        security: the protection of all data to other hosts: ``"auto"``, ``"tls:/folder"``, or another of those that
            `Config` lists.
        namespace: the namespace of actors' names, unless a call names another; default ``"default"``.
        log_to_driver: show here what actors print; default True.
        config: all settings at once; the other arguments override it.
        settings: any other setting by its name, such as ``warn_after=0``; see `Config`.

    Returns:
        An object to await, which gives the runtime, or to enter by ``async with``, which also shuts it down at the end.
        In a thread without an event loop its ``result()`` and ``with`` do so, on a loop in a thread of its own.

    Raises:
        TypeError: an argument has the wrong type, or is no setting; at the call.
        ValueError: `transports` names an unknown transport, or `resources` names CPU or GPU or has a name with a lone
            surrogate or an integer of 2^63 or more; at the call.

    Raises when awaited:
        AlreadyInitialized: the runtime is running in this process, or the process is an actor's.
        TypeError, ValueError: a setting is wrong, here, in the environment or in a file; the message names the source.
            Likewise `num_cpus`, `num_gpus` or `resources` together with `address`.
        ConnectionLost: no head is found by `address`, or the process there takes no programs; or the embedded node's
            agent ended, or was not ready within `Config.spawn_timeout` seconds.
        AuthenticationError: there is no token, the token is not that of the cluster, or other users can read the
            token's file; likewise for certificates.
        VersionMismatch: the cluster speaks another protocol or Python version.
        OSError: the machine lacks a call of the system, a file cannot be made, or the node agent cannot be started; the
            message has the remedy.

    Cancelling an ``await zc.init()`` ends all that it has started.
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
        check_can_be_sent("zc.init: resources", {key: amount})
        if key in ("CPU", "GPU"):
            raise ValueError(f"zc.init: give {key} by num_{key.lower()}s, not in resources")
    named = {
        "address": address, "num_cpus": num_cpus, "num_gpus": num_gpus, "store_capacity": store_capacity,
        "namespace": namespace, "log_to_driver": log_to_driver, "security": security,
        "transports": None if transports is None else ",".join(transports), **settings,
    }  # fmt: skip
    for name in settings:
        if name not in FurtherSettings.__annotations__:
            raise TypeError(unknown_setting("zc.init", name))
    if config is not None:
        if not isinstance(config, Config):
            raise TypeError(f"zc.init: config must be a zc.Config, not {shown_class(type(config))}")
        named = {**asdict(config), **{key: value for key, value in named.items() if value is not None}}
    if token is not None and not isinstance(token, str):
        raise TypeError(f"zc.init: token must be a str, not {shown_class(type(token))}")
    counted = num_cpus is not None or num_gpus is not None
    own_host = settings.get("host") is not None
    return Init(named, {"resources": dict(resources), "counted": counted, "token": token, "own_host": own_host})


def check_free() -> None:
    """Check that this process has no runtime, and is no worker. A runtime whose loop has ended without a shutdown is
    ended here.

    Raises:
        AlreadyInitialized: the process has a runtime, or is an actor's.
    """
    global _runtime
    if _runtime is not None and _runtime.process.loop.is_closed():
        _runtime.end_now()
        _runtime = None
    if _runtime is not None or _starting:
        raise AlreadyInitialized(
            "zc.init was called before in this process, and what it started runs: go on with that, without zc.init(); "
            "for other settings call 'await zc.shutdown()' first"
        )
    if context.current_or_none() is not None:
        raise AlreadyInitialized(
            "zc.init: this is an actor's process, which belongs to a node already; just spawn actors"
        )


def adopt(runtime: Runtime) -> None:
    """Take `runtime`, which was started elsewhere, for the one of this process: `shutdown` ends it, and `init` is
    refused until then. Call `check_free` before."""
    global _runtime
    _runtime = runtime


async def _start(arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> Runtime:
    global _runtime, _starting
    check_free()
    open_standard()
    check_calls()
    config, sources = load_config(arguments)
    _starting = True
    try:
        if config.address is None:
            _runtime = await _start_node(config, extra["resources"])
        else:
            if extra["resources"] or extra["counted"]:
                raise ValueError(
                    "zc.init: num_cpus, num_gpus and resources are a node's, and a program that joins a cluster at "
                    f"{config.address} brings none; give them to zcactor start"
                )
            # A `Config` that was passed has all fields, so a default in it does not say whether the caller has chosen
            # it.
            own_host = extra["own_host"] or config.host != Config().host
            own_host = own_host or sources["host"] not in ("default", "argument")
            from zcactor.driver.joining import join  # which programs with a node of their own do without

            _runtime = await join(config, extra["token"], own_host=own_host)
    finally:
        _starting = False
    return _runtime


async def _start_node(config: Config, resources: Mapping[str, float]) -> Runtime:
    raise_descriptor_limit()
    watch_forks()
    with contextlib.ExitStack() as undo:
        directory = RunDirectory(base_directory())
        undo.callback(directory.remove)
        driver, agent_id = ids.new_process(), ids.new_process()
        last_resort = LastResort(agent_id.hex())
        undo.callback(last_resort.close)
        undo.callback(last_resort.end)
        agent, control = launch(directory.lock_fd, node=agent_id.hex())
        undo.callback(end_agent, agent)
        undo.callback(control.close)
        loop = asyncio.get_running_loop()
        secret = secrets.token_bytes(32)
        capacity = config.store_capacity or default_capacity()
        gpus = offered_gpus(config, os.environ)
        send_setup(
            control,
            {
                "directory": str(directory.path), "token": secret, "agent": agent_id, "driver": driver,
                "loop": chosen_loop(config.loop), "config": asdict(config), "gpus": gpus,
                "resources": resources_of(config, resources, gpus), "cwd": working_directory(),
                "heartbeat": HEARTBEAT, "hang_after": HANG_AFTER,
                "head": (agent_id, ""), "clustered": False, "port": 0, "stays": False,
                "worker": {"store_capacity": capacity, "namespace": config.namespace},
            },
        )  # fmt: skip
        # Only now, while the agent starts: this takes as long as all that is done before the agent is there.
        import numpy as np  # noqa: F401  # which the runtime needs in any case

        from zcactor.assembly.endpoints import make_endpoint
        from zcactor.driver.process import make_process

        store = Store(capacity, driver)
        undo.callback(store.close)
        endpoint = make_endpoint(config, directory.path, driver, secret, store)
        process = make_process(config, directory, driver, store, endpoint, agent_id)
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
    return EmbeddedRuntime(config, process, directory, agent, control, last_resort)


async def _agent_is_ready(
    loop: asyncio.AbstractEventLoop,
    control: socket.socket,
    agent: subprocess.Popen[bytes],
    timeout: float,
) -> None:
    control.setblocking(False)
    told = b""
    try:
        async with asyncio.timeout(timeout):
            told = await loop.sock_recv(control, _WORD)
            if told[:1] == b"r":
                return
    except TimeoutError:
        raise ConnectionLost(f"the node agent did not start within {timeout:g} s (spawn_timeout)") from None
    except ConnectionResetError:  # the agent ended before it had read all of its setup
        pass
    end_agent(agent)
    if told:
        raise ConnectionLost(f"the node could not start: {told[1:].decode(errors='replace')}")
    raise ConnectionLost(
        f"the node agent ended at its start with status {agent.returncode}; its own error is printed above"
    )


def shutdown() -> Operation[None]:
    """End every actor of this program, its embedded node, and the runtime of this process. Received arrays stay valid.

    Actors are stopped in order: they run their queued calls, close, and run their exit functions, all within
    `Config.shutdown_timeout` seconds. Then the rest is killed, and a line of the log counts this program's calls that
    have not run. In a cluster that the program has joined, the cluster and its detached actors go on.

    Raises:
        NotInitialized: the runtime is not running in this process; at the call.
        RuntimeError: arrays of this process were changed after they were passed, as the setting ``check`` has found at
            the ends of leases. All has ended. The end of ``async with zc.init()`` raises the same, unless it ends by
            another exception.

    Cancelling `shutdown` still ends everything, but kills actors instead of closing them. A cancellation that is due
    when it begins, such as a Ctrl-C that came while the program computed, is raised after the orderly end.
    """
    if _runtime is None:
        raise NotInitialized("zc.shutdown: the runtime is not running in this process")
    return _Shutdown(_runtime)


class _Shutdown(Background[None]):
    """The end of a runtime, which begins even where the await is cancelled at once: see `Runtime.aclose`."""

    __slots__ = ()

    def __init__(self, runtime: Runtime) -> None:
        loop, running, thread = runtime.process.loop, asyncio._get_running_loop(), runtime.thread
        if not loop.is_running() and running is not None:
            loop = running
        elif loop.is_closed():
            thread = LoopThread("asyncio")
            loop = thread.loop
        super().__init__(_shut_down(runtime), "zc.shutdown", loop)
        if thread is not None:
            ends = thread.end
            self.future().add_done_callback(lambda _: ends())

    def __await__(self) -> Generator[Any, None, None]:
        try:
            yield  # the work begins, as it would not where this task is cancelled already
        except asyncio.CancelledError:
            self.cancel()
        yield from super().__await__()


async def _shut_down(runtime: Runtime) -> None:
    checker = await _end(runtime)
    if checker is not None:
        checker.raise_found()


async def _end(runtime: Runtime, *, again: bool = False) -> Checker | None:
    """End the runtime; see `Runtime.aclose`. Returns its check mode."""
    global _runtime
    if _runtime is runtime:
        _runtime = None
    if runtime.process.loop is asyncio.get_running_loop():
        await runtime.aclose(again=again)
    else:
        runtime.end_now()  # its own loop has ended
    return runtime.process.checker


def resources_of(config: Config, custom: Mapping[str, float], gpus: Sequence[str]) -> dict[str, float]:
    """The resources of a node, amounts by name: those in `config` or else those of the machine, and the `custom` ones.

    Args:
        config: the settings.
        custom: amounts by name.
        gpus: the UUIDs of the GPUs that the node offers.
    """
    count = len(gpus) if config.num_gpus is None else config.num_gpus
    total = {"CPU": float(config.num_cpus if config.num_cpus is not None else usable_cpus()), **custom}
    if count:
        total["GPU"] = float(count)
    return total


def _after_fork() -> None:
    """Forget the runtime in the child of a fork: the node is the parent's."""
    global _runtime
    if _runtime is not None:
        _runtime.forget()
        _runtime = None


def _at_exit() -> None:
    """End the runtime of a program that exits without `shutdown`, and leave nothing behind."""
    global _runtime
    if _runtime is not None:
        runtime, _runtime = _runtime, None
        if runtime.thread is None:
            _leave(runtime)
        else:
            with contextlib.suppress(TimeoutError):  # a callback of the program's blocks the loop
                runtime.thread.run(_left_on_loop(runtime), _LEAVE)
            runtime.thread.end()
            runtime.thread.join(_LEAVE)


def _leave(runtime: Runtime) -> None:
    runtime.tell_unfinished(runtime.unfinished())
    if isinstance(runtime, EmbeddedRuntime):  # a cluster ends actors in order
        runtime.tell_left()
    runtime.end_now()


async def _left_on_loop(runtime: Runtime) -> None:
    _leave(runtime)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
