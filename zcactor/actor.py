"""Actors: the decorators, spawning, ending, and what an actor may ask about itself."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

from zcactor.context import current, current_host
from zcactor.errors import ActorDied, ConnectionLost, NotInitialized, RemoteError
from zcactor.future import ObjectRef
from zcactor.handle import ActorHandle
from zcactor.interface import MARK, Interface
from zcactor.marshal.sealed import Sealed
from zcactor.options import ActorDeclaration, MethodOptions, SpawnOptions, check_options, check_together

if TYPE_CHECKING:
    from zcactor.runtime.process import Process
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

    async def spawn(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Start the actor; see `spawn`."""
        return await _spawn(self._cls, self._options, args, kwargs)  # type: ignore[no-any-return]

    def options(self, **options: Unpack[SpawnOptions]) -> ActorOptions[P, T_co]:
        """These options, changed.

        Raises:
            TypeError: an unknown option or a value of the wrong type.
        """
        check_options("spawn", f"{self._cls.__name__}.options", options)
        return ActorOptions(self._cls, {**self._options, **options})

    def __repr__(self) -> str:
        return f"<{self._cls.__name__} with options {self._options}>"


class ActorClass(ActorOptions[P, T_co]):
    """A decorated class as pyright sees it: calling it makes a local instance. (mypy keeps the class itself.)"""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """A local instance, as of any class."""
        return self._cls(*args, **kwargs)  # type: ignore[no-any-return]


async def _spawn_class(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Start an actor of this class with the given constructor arguments; see `zcactor.spawn`."""
    return await _spawn(cls, {}, args, kwargs)


def _options_class(cls: Any, /, **options: Any) -> Any:
    """The class with options; see `zcactor.options.SpawnOptions`."""
    check_options("spawn", f"{cls.__name__}.options", options)
    return ActorOptions(cls, options)


class Actor:
    """The optional base: `spawn` and `options` exact in both checkers, and the name stays usable as an annotation."""

    @classmethod
    async def spawn(cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Start an actor of this class; see `zcactor.spawn`."""
        return await _spawn(cls, {}, args, kwargs)  # type: ignore[no-any-return]

    @classmethod
    def options(cls: Callable[P, T], **options: Unpack[SpawnOptions]) -> ActorOptions[P, T]:
        """The class with options; see `zcactor.options.SpawnOptions`."""
        check_options("spawn", f"{cls.__name__}.options", options)
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
    """Make a class an actor class: it gains ``spawn`` and ``options``, and keeps working locally.

    Args:
        cls: the class, when used bare: ``@zc.actor``.
        options: defaults of its actors, when used with options; see `zcactor.options.ActorDeclaration`.

    Raises:
        TypeError: not a class, an unknown option or a value of the wrong type, or the class has a ``spawn`` or
            ``options`` of its own.
    """
    check_options("declaration", "zc.actor", options)

    def declare(target: Any) -> Any:
        if not isinstance(target, type):
            raise TypeError(f"@zc.actor decorates a class, not {type(target).__name__}")
        for name, function in (("spawn", _spawn_class), ("options", _options_class)):
            if name in vars(target):
                raise TypeError(f"{target.__name__} defines {name!r}, which @zc.actor adds; rename the method")
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
    check_together(f"{cls.__name__}.options", merged)
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise TypeError(f"{cls.__name__} cannot be constructed: it is abstract (missing: {missing})")
    _check_constructor(cls, args, kwargs)
    args = tuple([await value if isinstance(value, ObjectRef) else value for value in args])
    kwargs = {name: await value if isinstance(value, ObjectRef) else value for name, value in kwargs.items()}
    merged["namespace"] = merged.get("namespace") or process.namespace
    recipe = Sealed(*process.marshaller.pack((cls, args, kwargs)))
    plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in merged.items()}
    kept = recipe if merged.get("max_restarts") else None
    handle, existed, object_id = await process.ask_agent("reserve", plain, cls.__name__, Interface.of(cls).wire(), kept)
    if existed:
        return handle
    remote = handle._remote
    host_process, index = remote.location
    failure = "its spawn was cancelled"
    try:
        session = await process.connect(host_process)
        await process.ask(session, "create", index, remote.actor_id, object_id, 0, plain, recipe)
        await process.ask_agent("constructed", remote.actor_id, None)
        failure = ""
    except RemoteError as error:
        failure = f"its constructor raised {error.type_name}"
        raise
    except ConnectionLost as error:
        failure = ""
        await _report(process, handle, "")
        _, _, cause = await process.locate(remote.actor_id)
        raise ActorDied(remote.label, cause or str(error), True) from None
    finally:
        if failure:
            process.start_task(_report(process, handle, failure))
    return handle


async def _report(process: Process, handle: ActorHandle, failure: str) -> None:
    """Tell the agent that there is no actor; see `zcactor.runtime.agent.NodeAgent.constructed`. Keeps the handle until
    then, or the agent would take its release for a spawn that was given up."""
    with contextlib.suppress(ConnectionLost):  # the agent is gone, and the actor with it
        await process.ask_agent("constructed", handle._remote.actor_id, failure)


def _check_constructor(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):  # a constructor written in C need not have one; the actor will judge
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{cls.__name__}(): {error}") from None


# ---------------------------------------------------------------- ending and finding


def _checked(handle: object, what: str) -> ActorHandle:
    if not isinstance(handle, ActorHandle):
        raise TypeError(f"zc.{what} takes a handle, not {type(handle).__name__}")
    return handle


async def stop(handle: object) -> None:
    """End an actor in order: its pending calls run, then ``__aexit__`` or ``close()`` if it has one, then its process
    ends. Calls made afterwards raise `ActorDied`. Ending a dead actor does nothing.

    Raises:
        NoSuchActor: the node does not know the actor.

    Cancelling abandons the wait; the actor still stops.
    """
    process = current()
    remote = _checked(handle, "stop")._remote
    if threading.get_ident() != process.thread:  # a sync method's own loop
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(stop(handle), process.loop))
        return
    with contextlib.suppress(ConnectionLost):  # it has ended, or is being restarted: nothing of ours is on the way
        # The request goes through the agent, and would overtake calls that still wait for credit or for a connection.
        # The answer to a ping comes when the actor's process has them.
        await remote.connected.wait()
        await process.ask(await process.connect(remote.location[0]), "ping")
    await process.ask_agent("stop", remote.actor_id)


async def kill(handle: object) -> None:
    """End an actor at once. Its open calls raise `ActorDied`; it is not restarted.

    Raises:
        NoSuchActor: the node does not know the actor.
    """
    await current().ask_agent("kill", _checked(handle, "kill")._remote.actor_id)


async def get_actor(name: str, *, namespace: str | None = None) -> Any:
    """The handle of the living actor called `name`.

    Raises:
        NoSuchActor: there is none; the message lists the names there are.
    """
    process = current()
    return await process.ask_agent("get_actor", name, namespace or process.namespace)


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
