"""Actors: the decorators, spawning, ending, and what an actor may ask about itself."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

from zcactor.context import current, current_host
from zcactor.errors import ActorDied, ConnectionLost, NotInitialized, RemoteError
from zcactor.future import ObjectRef
from zcactor.handle import ActorHandle
from zcactor.interface import MARK, Interface, constructor_of, shown
from zcactor.marshal.sealed import Sealed
from zcactor.options import ActorDeclaration, MethodOptions, SpawnOptions, check_options, check_together

if TYPE_CHECKING:
    from zcactor.context import Runtime
    from zcactor.handle import RemoteActor
    from zcactor.typed import Method, MethodDecorator, StreamMethod

__all__ = [
    "Actor",
    "ActorClass",
    "ActorOptions",
    "CurrentActor",
    "actor",
    "current_actor",
    "declared_options",
    "get_actor",
    "kill",
    "method",
    "spawn",
    "stop",
]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
ActorT = TypeVar("ActorT", bound="Actor")
T_co = TypeVar("T_co", covariant=True)

logger = logging.getLogger("zcactor")
SPAWN_PATIENCE = 2.0
"""Seconds after which a spawn that waits says for what: above what starting a process takes."""
DECLARED = "__zcactor_options__"
"""Attribute in which `@zc.actor` keeps a class's options."""


@overload
def method(function: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /) -> Method[S, P, R]: ...
@overload
def method(  # type: ignore[overload-overlap]
    function: Callable[Concatenate[S, P], AsyncIterator[T]], /
) -> StreamMethod[S, P, T]: ...
@overload
def method(  # type: ignore[overload-overlap]
    function: Callable[Concatenate[S, P], Iterator[T]], /
) -> StreamMethod[S, P, T]: ...
@overload
def method(function: Callable[Concatenate[S, P], R], /) -> Method[S, P, R]: ...
@overload
def method(**options: Unpack[MethodOptions]) -> MethodDecorator: ...
def method(function: Any = None, /, **options: Any) -> Any:
    """Give a method exact static types and options of its own. Public methods can be called remotely without it.

    Args:
        function: the method, when used bare: ``@zc.method``.
        options: see `zcactor.options.MethodOptions`, when used with options: ``@zc.method(timeout=5)``.

    Raises:
        TypeError: an unknown option or a value of the wrong type.
        ValueError: options that contradict each other.
    """
    check_options("method", "zc.method", options)
    check_together("zc.method", options)

    def mark(target: Any) -> Any:
        if not callable(target) and not isinstance(target, staticmethod | classmethod):
            raise TypeError(f"@zc.method decorates a function, not {type(target).__name__}")
        plain = target.__func__ if isinstance(target, staticmethod | classmethod) else target
        if options.get("inline") and (
            inspect.iscoroutinefunction(plain)
            or inspect.isgeneratorfunction(plain)
            or inspect.isasyncgenfunction(plain)
        ):
            raise TypeError(
                f"{plain.__qualname__}: inline=True is for plain methods, not for coroutines and generators"
            )
        setattr(plain, MARK, dict(options))
        return target

    return mark if function is None else mark(function)


class ActorOptions(Generic[P, T_co]):
    """An actor class with options: `spawn` has the constructor's own signature."""

    def __init__(self, cls: Callable[P, T_co], options: Mapping[str, Any]) -> None:
        self._cls: Any = cls
        self._options = dict(options)

    def spawn(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T_co]:
        """Start the actor; see `spawn`."""
        return _spawning(self._cls, self._options, args, kwargs)

    def options(self, **options: Unpack[SpawnOptions]) -> ActorOptions[P, T_co]:
        """These options, changed.

        Raises:
            TypeError: an unknown option or a value of the wrong type.
        """
        check_options("spawn", f"{shown(self._cls.__name__)}.options", options)
        return ActorOptions(self._cls, {**self._options, **options})

    def __repr__(self) -> str:
        return f"<{shown(self._cls.__name__)} with options {self._options}>"


class ActorClass(ActorOptions[P, T_co]):
    """A decorated class as pyright sees it: calling it makes a local instance. (mypy keeps the class itself.)"""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """A local instance, as of any class."""
        return self._cls(*args, **kwargs)  # type: ignore[no-any-return]


def _spawning(
    cls: Any, options: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Coroutine[Any, Any, Any]:
    """The coroutine that starts an actor, under the name that its user called it by: who does not await it is told."""
    coroutine: Any = _spawn(cls, options, args, kwargs)
    coroutine.__qualname__ = f"{shown(cls.__name__)}.spawn"
    return coroutine  # type: ignore[no-any-return]


def _spawn_class(cls: Any, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
    """Start an actor of this class with the given constructor arguments; see `zcactor.spawn`."""
    return _spawning(cls, {}, args, kwargs)


def _options_class(cls: Any, /, **options: Any) -> Any:
    """The class with options; see `zcactor.options.SpawnOptions`."""
    check_options("spawn", f"{shown(cls.__name__)}.options", options)
    return ActorOptions(cls, options)


_ADDED = {"spawn": _spawn_class, "options": _options_class}
"""What `@zc.actor` adds to a class."""


class Actor:
    """The optional base: `spawn` and `options` exact in both checkers, and the name stays usable as an annotation."""

    @classmethod
    def spawn(cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        """Start an actor of this class; see `zcactor.spawn`."""
        return _spawning(cls, {}, args, kwargs)

    @classmethod
    def options(cls: Callable[P, T], **options: Unpack[SpawnOptions]) -> ActorOptions[P, T]:
        """The class with options; see `zcactor.options.SpawnOptions`."""
        check_options("spawn", f"{shown(cls.__name__)}.options", options)
        return ActorOptions(cls, options)


class ActorDecorator(Protocol):
    """What `@zc.actor(...)` is once it has its options."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
        self, cls: type[ActorT], /
    ) -> type[ActorT]: ...
    @overload
    def __call__(self, cls: Callable[P, T], /) -> ActorClass[P, T]: ...


@overload
def actor(  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
    cls: type[ActorT], /
) -> type[ActorT]: ...
@overload
def actor(cls: Callable[P, T], /) -> ActorClass[P, T]: ...
@overload
def actor(**options: Unpack[ActorDeclaration]) -> ActorDecorator: ...
def actor(cls: Any = None, /, **options: Any) -> Any:
    """Make a class an actor class: it gains ``spawn`` and ``options``, and keeps working locally. A class that is one
    already stays what it is, with the options that are given now in the place of those it had.

    Args:
        cls: the class, when used bare: ``@zc.actor``.
        options: defaults of its actors, when used with options; see `zcactor.options.ActorDeclaration`.

    Raises:
        TypeError: not a class, an unknown option or a value of the wrong type, or the class has a ``spawn`` or
            ``options`` of its own. The class is unchanged then.
    """
    check_options("declaration", "zc.actor", options)

    def declare(target: Any) -> Any:
        if not isinstance(target, type):
            raise TypeError(f"@zc.actor decorates a class, not {type(target).__name__}")
        for name, function in _ADDED.items():
            own = vars(target).get(name)
            if own is not None and getattr(own, "__func__", None) is not function:
                raise TypeError(f"{shown(target.__name__)} defines {name!r}, which @zc.actor adds; rename the method")
        for name, function in _ADDED.items():
            setattr(target, name, classmethod(function))
        setattr(target, DECLARED, {**declared_options(target), **options})
        return target

    return declare if cls is None else declare(cls)


def declared_options(cls: type) -> Mapping[str, Any]:
    """The options given to `@zc.actor`, empty for other classes."""
    return getattr(cls, DECLARED, {})


async def spawn(cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Start an actor of `cls`, any class, and return its handle once the constructor has returned.

    Args:
        cls: the class; its options are those of `@zc.actor` where it has any.
        args: constructor arguments, passed like those of a call.
        kwargs: likewise.

    Raises:
        NotInitialized: no runtime is running.
        TypeError: the arguments do not fit the constructor, or cannot be pickled.
        NameTaken: the name is in use.
        InsufficientResources: the node can never satisfy the request, or no process could be started.
        Exception: what the constructor raised, as a `RemoteError` of its type.

    Waits while the resources it asks for are in use. Cancelling withdraws the request, and ends the actor if it exists.
    """
    return await _spawn(cls, {}, args, kwargs)  # type: ignore[no-any-return]


async def _spawn(cls: Any, options: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    process = current()
    if not isinstance(cls, type):
        raise TypeError(f"zc.spawn takes a class, not {type(cls).__name__}")
    merged: dict[str, Any] = {**declared_options(cls), **options}
    name = shown(cls.__name__)
    check_together(f"{name}.options", merged)
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise TypeError(f"{name} cannot be constructed: it is abstract (missing: {missing})")
    constructor_of(cls).check(args, kwargs)
    args = tuple([await value if isinstance(value, ObjectRef) else value for value in args])
    kwargs = {name: await value if isinstance(value, ObjectRef) else value for name, value in kwargs.items()}
    merged["namespace"] = merged.get("namespace") or process.namespace
    recipe = Sealed(*process.marshaller.pack_call((cls, *args), kwargs))
    plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in merged.items()}
    kept = recipe if merged.get("max_restarts") else None
    with _telling(process, name):
        handle, existed, object_id = await process.head.ask_agent(
            "reserve", plain, name, Interface.of(cls).wire(), kept
        )
    if existed:
        return handle
    remote = handle._remote
    host_process, index = remote.location
    failure = "its spawn was cancelled"
    try:
        session = await process.connections.connect(host_process)
        await process.requests.ask(session, "create", index, remote.actor_id, object_id, 0, plain, recipe)
        await process.head.ask_agent("constructed", remote.actor_id, None)
        failure = ""
    except RemoteError as error:
        failure = f"its constructor raised {error.type_name}"
        raise
    except ConnectionLost as error:
        failure = ""
        await _report(process, handle, "")
        _, _, cause = await process.head.locate(remote.actor_id)
        raise ActorDied(remote.label, cause or str(error), True) from None
    finally:
        if failure:
            process.tasks.start(_report(process, handle, failure))
    return handle


@contextlib.contextmanager
def _telling(process: Runtime, class_name: str) -> Iterator[None]:
    """Says for what a spawn waits, if it does so for long."""
    if not process.config.warn_after:
        yield
        return
    loop = process.loop
    timers: list[asyncio.TimerHandle] = []

    def arm() -> None:
        timers.append(loop.call_later(SPAWN_PATIENCE, lambda: process.tasks.start(_tell(process, class_name))))

    def disarm() -> None:
        timers[0].cancel()

    here = threading.get_ident() == process.thread
    if here:
        arm()
    else:
        loop.call_soon_threadsafe(arm)
    try:
        yield
    finally:
        if here:
            disarm()
        else:
            loop.call_soon_threadsafe(disarm)


async def _tell(process: Runtime, class_name: str) -> None:
    with contextlib.suppress(ConnectionLost):  # the agent is gone, which ends the spawn too
        line = await process.head.ask_agent("waits", class_name)
        if line:
            logger.warning("%s", line)


async def _report(process: Runtime, handle: ActorHandle, failure: str) -> None:
    """Tell the agent that there is no actor; see `zcactor.runtime.agent.NodeAgent.constructed`. Keeps the handle until
    then, or the agent would take its release for a spawn that was given up."""
    with contextlib.suppress(ConnectionLost):  # the agent is gone, and the actor with it
        await process.head.ask_agent("constructed", handle._remote.actor_id, failure)


# ---------------------------------------------------------------- ending and finding


def _checked(handle: object, what: str) -> ActorHandle:
    if not isinstance(handle, ActorHandle):
        raise TypeError(f"zc.{what} takes a handle, not {type(handle).__name__}")
    return handle


async def stop(handle: object) -> None:
    """End an actor in order: its pending calls run, then ``__aexit__`` or ``close()`` if it has one, then its process
    ends. Calls made afterwards raise `ActorDied`. Ending a dead actor does nothing.

    In a method of the actor itself it returns at once: the actor stops when the calls that run have ended, this one
    among them.

    Raises:
        NoSuchActor: the node does not know the actor.

    Cancelling abandons the wait; the actor still stops.
    """
    process = current()
    remote = _checked(handle, "stop")._remote
    host = current_host.get()
    if host is not None and host.info is not None and host.info.actor_id == remote.actor_id:
        process.tasks.start(_stop_later(process, remote))
        return
    if threading.get_ident() != process.thread:  # a sync method's own loop
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(stop(handle), process.loop))
        return
    await _request_stop(process, remote)


async def _request_stop(process: Runtime, remote: RemoteActor) -> None:
    with contextlib.suppress(ConnectionLost):  # it has ended, or is being restarted: nothing of ours is on the way
        # The request goes through the agent, and would overtake calls that still wait for credit or for a connection.
        # The answer to a ping comes when the actor's process has them.
        await remote.connected.wait()
        await process.requests.ask(await process.connections.connect(remote.location[0]), "ping")
    await process.head.ask_agent("stop", remote.actor_id)


async def _stop_later(process: Runtime, remote: RemoteActor) -> None:
    with contextlib.suppress(ConnectionLost):  # the node ends, and the actor with it
        await _request_stop(process, remote)


async def kill(handle: object) -> None:
    """End an actor at once. Its open calls raise `ActorDied`; it is not restarted.

    Raises:
        NoSuchActor: the node does not know the actor.
    """
    await current().head.ask_agent("kill", _checked(handle, "kill")._remote.actor_id)


async def get_actor(name: str, *, namespace: str | None = None) -> Any:
    """The handle of the living actor called `name`.

    Raises:
        NoSuchActor: there is none; the message lists the names there are.
    """
    process = current()
    return await process.head.ask_agent("get_actor", name, namespace or process.namespace)


@dataclass(frozen=True, slots=True)
class CurrentActor:
    """What an actor may know of itself."""

    handle: Any
    """Its own handle, to pass to others or to call itself."""
    id: str
    """32 hex digits."""
    node: str
    """Id of its node."""
    restarts: int
    """How often it has been started again."""


def current_actor() -> CurrentActor:
    """The actor whose method is running.

    Raises:
        NotInitialized: this is not a method of an actor.
    """
    host = current_host.get()
    if host is None or host.info is None:
        raise NotInitialized("zc.current_actor() works inside an actor's methods only; this is not one")
    info = host.info
    return CurrentActor(info.handle, info.actor_id.hex(), info.node, info.restarts)
