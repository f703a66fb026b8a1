"""Actors: the decorators, spawning, ending, and the information that an actor has about itself."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload
from weakref import WeakKeyDictionary

from zcactor.api.future import ObjectRef
from zcactor.api.handle import ActorHandle
from zcactor.api.operation import Background, operation
from zcactor.errors import ActorDied, ConnectionLost, HeadUnavailable, NotInitialized, RemoteError, remote_of
from zcactor.exception_pickling import hides, shown_class
from zcactor.ids import for_spawn
from zcactor.interface import MARK, Interface, constructor_of
from zcactor.logs import logger
from zcactor.marshal.packed import Packed
from zcactor.options import (
    ActorDeclaration,
    ActorSpec,
    MethodOptions,
    SpawnOptions,
    check_options,
    check_together,
    checked_name,
)
from zcactor.process.cluster import HeadService, WorkerService
from zcactor.process.context import current, current_host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping

    from zcactor.api.remote_actor import RemoteActor
    from zcactor.api.typed import Method, MethodDecorator, StreamMethod
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.session import Session

__tracebackhide__ = hides
__all__ = [
    "Actor",
    "ActorClass",
    "ActorOptions",
    "CurrentActor",
    "Spawning",
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

SPAWN_PATIENCE = 2.0
"""Seconds after which a waiting spawn logs the reason: longer than starting a process takes."""
_asked: WeakKeyDictionary[LocalProcess, dict[str, bool]] = WeakKeyDictionary()
"""Classes whose spawns take long; the value is whether another spawn has become slow since the agent was last asked."""
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
    """Give a method exact static types and options of its own. Public methods can be called remotely without this
    decorator.

    Args:
        function: the method, when the decorator is used bare: ``@zc.method``.
        options: options of the method, see `zcactor.options.MethodOptions`: ``@zc.method(timeout=5)``.

    Returns:
        The function itself, or a decorator when options were given.

    Raises:
        TypeError: an unknown option, a value of the wrong type, an object that is not a function, or ``inline=True``
            for a coroutine function or a generator function.
        ValueError: two options contradict each other, or a value cannot be sent.
    """
    options = check_options("method", "zc.method", options)
    check_together("zc.method", options)

    def mark(target: Any) -> Any:
        if not callable(target) and not isinstance(target, staticmethod | classmethod):
            raise TypeError(f"@zc.method decorates a function, not {shown_class(type(target))}")
        plain = target.__func__ if isinstance(target, staticmethod | classmethod) else target
        if options.get("inline") and (
            inspect.iscoroutinefunction(plain)
            or inspect.isgeneratorfunction(plain)
            or inspect.isasyncgenfunction(plain)
        ):
            raise TypeError(
                f"{plain.__qualname__}: inline=True is for plain methods, not for coroutines and generators"
            )
        setattr(plain, MARK, options)
        return target

    return mark if function is None else mark(function)


class ActorOptions(Generic[P, T_co]):
    """An actor class with options. Its `spawn` has the constructor's own signature."""

    def __init__(self, cls: Callable[P, T_co], options: Mapping[str, Any]) -> None:
        self._cls: Any = cls
        self._options = dict(options)

    def spawn(self, *args: P.args, **kwargs: P.kwargs) -> Spawning[T_co]:
        """Start an actor with these options; see `zcactor.spawn`."""
        return _spawning(self._cls, self._options, args, kwargs)

    def options(self, **options: Unpack[SpawnOptions]) -> ActorOptions[P, T_co]:
        """Return a new object with these options added, or in place of the same ones. Arguments and exceptions as for
        `Actor.options`."""
        checked = check_options("spawn", f"{shown_class(self._cls)}.options", options)
        return ActorOptions(self._cls, {**self._options, **checked})

    def __repr__(self) -> str:
        return f"<{shown_class(self._cls)} with options {self._options}>"


class ActorClass(ActorOptions[P, T_co]):
    """A decorated class as pyright sees it: calling it makes a local instance. (For mypy it stays the class itself.)"""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Make a local instance, as any class does."""
        return self._cls(*args, **kwargs)  # type: ignore[no-any-return]


class Spawning(Background[T_co]):
    """The start of an actor, which gives the handle. It is no handle, and says so where it is used as one."""

    __slots__ = ()

    def _advice(self) -> str:
        return (
            f"this is a spawn that was not awaited, not a handle: write 'handle = await {self._name}(...)', or "
            f"'handle = {self._name}(...).result()' in a thread that runs no event loop"
        )


def _spawning(
    cls: Any, options: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str = ""
) -> Spawning[Any]:
    spawning = _Spawn(cls, options, args, kwargs)
    return Spawning(spawning.actor(), name or f"{shown_class(cls)}.spawn")


def _spawn_class(cls: Any, /, *args: Any, **kwargs: Any) -> Spawning[Any]:
    """Start an actor of this class with the given constructor arguments; see `zcactor.spawn`."""
    return _spawning(cls, {}, args, kwargs)


def _options_class(cls: Any, /, **options: Any) -> Any:
    """Give the actors of this class options; see `zcactor.Actor.options`."""
    return ActorOptions(cls, check_options("spawn", f"{shown_class(cls)}.options", options))


_ADDED = {"spawn": _spawn_class, "options": _options_class}  # the class methods that `@zc.actor` adds to a class
_KEPT = 1 << 20
"""Bytes of the class and arguments of an actor that may restart which stay together, for the log of the heads."""


class Actor:
    """The optional base class of actors. With it both type checkers see exact `spawn` and `options`, and the class name
    stays usable as an annotation."""

    @classmethod
    def spawn(cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Spawning[T]:
        """Start an actor of this class; see `zcactor.spawn`."""
        return _spawning(cls, {}, args, kwargs)

    @classmethod
    def options(cls: Callable[P, T], **options: Unpack[SpawnOptions]) -> ActorOptions[P, T]:
        """Give the actors of this class options. Nothing is started.

        Args:
            options: options of the actor, see `zcactor.options.SpawnOptions`.

        Returns:
            An object with the class's ``spawn``, which uses these options.

        Raises:
            TypeError: an unknown option or a value of the wrong type.
            ValueError: a text with a lone surrogate, an integer of 2^63 or more, or a variable in ``env`` that no
                process can have.
        """
        name = shown_class(cls)  # type: ignore[arg-type]
        return ActorOptions(cls, check_options("spawn", f"{name}.options", options))


class ActorDecorator(Protocol):
    """The type of ``@zc.actor(...)``: a decorator that has its options."""

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

    Decorating an actor class again keeps it, and the options given now replace those of the same names.

    Args:
        cls: the class, when the decorator is used bare: ``@zc.actor``.
        options: default options of the class's actors, see `zcactor.options.ActorDeclaration`:
            ``@zc.actor(num_cpus=1)``.

    Returns:
        The class itself, or a decorator when options were given.

    Raises:
        TypeError: the decorated object is not a class, an option is unknown or has a value of the wrong type, or the
            class has a ``spawn`` or ``options`` of its own. The class is unchanged then.
        ValueError: as for `Actor.options`.
    """
    options = check_options("declaration", "zc.actor", options)

    def declare(target: Any) -> Any:
        if not isinstance(target, type):
            raise TypeError(f"@zc.actor decorates a class, not {shown_class(type(target))}")
        for name, function in _ADDED.items():
            own = vars(target).get(name)
            if own is not None and getattr(own, "__func__", None) is not function:
                raise TypeError(f"{shown_class(target)} defines {name!r}, which @zc.actor adds; rename the method")
        for name, function in _ADDED.items():
            setattr(target, name, classmethod(function))
        setattr(target, DECLARED, {**declared_options(target), **options})
        return target

    return declare if cls is None else declare(cls)


def declared_options(cls: type) -> Mapping[str, Any]:
    """The options given to `@zc.actor`; empty for other classes."""
    return getattr(cls, DECLARED, {})


def spawn(cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Spawning[T]:
    """Start an actor of `cls`, which may be any class, and return its handle once the constructor has returned.

    The spawn waits while the resources that it asks for are in use.

    Args:
        cls: the class; its options are those of `@zc.actor`, if it was decorated.
        args: positional arguments of the constructor, passed like those of a call; references are awaited first.
        kwargs: keyword arguments of the constructor, likewise.

    Returns:
        An operation, which has begun and gives the handle, typed as `cls`. With ``get_if_exists`` it may be the handle
        of an actor that exists already.

    Raises:
        NotInitialized: no runtime is running; at the call.
        TypeError: `cls` is not a class or is abstract, the arguments do not fit the constructor, or an argument cannot
            be pickled.
        ValueError: two options contradict each other.
        NameTaken: the name is in use.
        InsufficientResources: the node can never satisfy the request, or no process could be started.
        ActorDied: the actor's process ended before the constructor had returned.
        ConnectionLost: the node agent has ended, or the node is shutting down.
        HeadUnavailable: the head's log does not take the actor.
        Exception: the error of the constructor, as a `RemoteError` of its type, or of a reference among the arguments.

    Cancelling withdraws the request, and ends the actor if it exists.
    """
    return _spawning(cls, {}, args, kwargs, "zc.spawn")


class _Spawn:
    """A spawn, whose arguments are packed at the call, as those of methods are; references among them are awaited
    before."""

    def __init__(
        self, cls: Any, options: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:  # fmt: skip
        self._process = process = current()
        if not isinstance(cls, type):
            raise TypeError(f"zc.spawn takes a class, not {shown_class(type(cls))}")
        merged: dict[str, Any] = {**declared_options(cls), **options}
        self._name = name = shown_class(cls)
        check_together(f"{name}.options", merged)
        if inspect.isabstract(cls):
            missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
            raise TypeError(f"{name} cannot be constructed: it is abstract (missing: {missing})")
        self._constructor = constructor_of(cls)
        self._constructor.check(args, kwargs)
        merged["namespace"] = merged.get("namespace") or process.namespace
        if (level := logging.getLogger().level) != logging.WARNING:
            merged["log_level"] = level
        self._cls, self._spec, self._interface = cls, ActorSpec.of(merged), Interface.declare(cls)
        self._recipe: Packed | None = None
        self._args, self._kwargs = args, kwargs
        if not any(type(value) is ObjectRef for value in (*args, *kwargs.values())):
            self._pack(args, kwargs)

    def _pack(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Packed:
        pack = self._process.marshaller.pack_call
        limit = _KEPT if self._spec.max_restarts else 0
        packed = pack((self._cls, *args), kwargs, payload_limit=limit, spec=self._constructor, first=0)
        self._args, self._kwargs, self._recipe = (), {}, Packed(*packed)
        return self._recipe

    async def actor(self) -> Any:
        """Start the actor, and return its handle."""
        process, recipe = self._process, self._recipe
        if recipe is None:
            args = tuple([await value if type(value) is ObjectRef else value for value in self._args])
            kwargs = {
                name: await value if type(value) is ObjectRef else value for name, value in self._kwargs.items()
            }  # fmt: skip
            recipe = self._pack(args, kwargs)
        plain, kept = self._spec.plain(), recipe if self._spec.max_restarts else None
        made, interface = for_spawn(), self._interface
        with _telling(process, self._name):
            handle, existed = await process.head.ask(
                HeadService.reserve, plain, self._name, interface, kept, *made, b""
            )  # fmt: skip
        if existed:
            return handle
        remote = handle._remote
        host_process, index = remote.location
        failure = "its spawn was cancelled"
        session: Session | None = None
        try:
            session = await process.connections.connect(host_process)
            await process.requests.ask(
                session, WorkerService.create, index, made.actor, made.object_id, 0, plain, interface, recipe, None
            )
            await process.head.ask(HeadService.constructed, remote.actor_id, None)
            failure = ""
        except RemoteError as error:
            failure = f"its constructor raised {remote_of(error).type_name}"
            raise
        except ConnectionLost as error:
            failure = ""
            await _report(process, handle, "")
            _, _, cause = await process.head.locate(remote.actor_id)
            if session is None:
                text = (
                    f"its process was not reached: {error.args[0]}{cause and f' ({cause})'}. Where that process lives, "
                    "let the firewalls of both hosts pass the ports that processes listen at; the setting ports bounds "
                    "them"
                )
                raise ActorDied(remote.label, text, False) from None
            raise ActorDied(remote.label, cause or str(error), True) from None
        finally:
            if failure:
                process.tasks.start(_report(process, handle, failure))
        return handle


@contextlib.contextmanager
def _telling(process: LocalProcess, class_name: str) -> Iterator[None]:
    """Log the reason why a spawn waits, if it waits for long."""
    if not process.config.warn_after:
        yield
        return
    timer = process.loop.call_later(SPAWN_PATIENCE, lambda: process.tasks.start(_tell(process, class_name)))
    try:
        yield
    finally:
        timer.cancel()


async def _tell(process: LocalProcess, class_name: str) -> None:
    """Log one line for all spawns of a class together: thousands may wait for the same reason."""
    asked = _asked.setdefault(process, {})
    if class_name in asked:
        asked[class_name] = True
        return
    asked[class_name] = True
    try:
        while asked[class_name]:
            asked[class_name] = False
            with contextlib.suppress(ConnectionLost):  # the agent has ended, which ends the spawn too
                line = await process.head.ask(HeadService.waits, class_name, b"")
                if line:
                    logger.warning("%s", line)
            await asyncio.sleep(SPAWN_PATIENCE)
    finally:
        del asked[class_name]


async def _report(process: LocalProcess, handle: ActorHandle, failure: str) -> None:
    """Report to the agent that the spawn failed; see `zcactor.control.head.Head.constructed`. The handle is kept until
    then: the agent would take its release for a spawn that was given up."""
    with contextlib.suppress(ConnectionLost, HeadUnavailable):  # the actor has ended, or nobody will hold it
        await process.head.ask(HeadService.constructed, handle._remote.actor_id, failure)


# ---------------------------------------------------------------- ending and finding


def _checked(handle: object, what: str) -> ActorHandle:
    if not isinstance(handle, ActorHandle):
        raise TypeError(f"zc.{what} takes a handle, not {shown_class(type(handle))}")
    return handle


@operation
async def stop(handle: object) -> None:
    """End an actor in order: its pending calls run, then ``__aexit__`` or ``close()`` if it has one, then its process
    ends.

    Returns when the actor has ended. Later calls raise `ActorDied`. Stopping a dead actor does nothing. In a method of
    the actor itself `stop` returns at once: the actor stops when all running calls have ended, including the caller.

    Args:
        handle: handle of the actor.

    Raises:
        NotInitialized: no runtime is running.
        TypeError: `handle` is not a handle.
        NoSuchActor: the node does not know the actor.
        ConnectionLost: the node agent has ended.
        HeadUnavailable: the head's log does not take it; the actor lives on, or ends once the log has taken it.

    Cancelling abandons the wait; the actor still stops.
    """
    process = current()
    remote = _checked(handle, "stop")._remote
    host = current_host.get()
    if host is not None and host.info is not None and host.info.actor_id == remote.actor_id:
        process.tasks.start(_stop_later(process, remote))
        return
    await _request_stop(process, remote)


async def _request_stop(process: LocalProcess, remote: RemoteActor) -> None:
    await remote.received()
    await process.head.ask(HeadService.stop, remote.actor_id)


async def _stop_later(process: LocalProcess, remote: RemoteActor) -> None:
    with contextlib.suppress(ConnectionLost):  # the node ends, and the actor with it
        await _request_stop(process, remote)


@operation
async def kill(handle: object) -> None:
    """End an actor at once. Its open calls raise `ActorDied`, and it is not restarted.

    Returns when the actor's process has ended; a shared process goes on.

    Args:
        handle: handle of the actor.

    Raises:
        NotInitialized: no runtime is running.
        TypeError: `handle` is not a handle.
        NoSuchActor: the node does not know the actor.
        ConnectionLost: the node agent has ended.
        HeadUnavailable: the head's log does not take it; the actor lives on, or ends once the log has taken it.

    Cancelling abandons the wait once the agent has the request; the actor still ends.
    """
    await current().head.ask(HeadService.kill, _checked(handle, "kill")._remote.actor_id)


@operation
async def get_actor(name: str, *, namespace: str | None = None) -> Any:
    """Look up a living actor by name.

    Args:
        name: the name from the actor's options.
        namespace: the namespace of the name; None means the namespace of `zcactor.init`.

    Returns:
        The actor's handle. While the actor is being started or restarted, `get_actor` waits.

    Raises:
        NotInitialized: no runtime is running.
        TypeError: `name` or `namespace` is not a str of 1 to 1,000 characters.
        ValueError: `name` or `namespace` has a lone surrogate, so that no actor can have it.
        NoSuchActor: no living actor has that name; the message lists the names in use.
        ConnectionLost: the node agent has ended.
        HeadUnavailable: the head's log has not taken earlier decisions.

    Cancelling has no effect on the actor.
    """
    process = current()
    wanted = checked_name("zc.get_actor: name", name)
    within = process.namespace if namespace is None else checked_name("zc.get_actor: namespace", namespace)
    return await process.head.ask(HeadService.get_actor, wanted, within)


@dataclass(frozen=True, slots=True)
class CurrentActor:
    """Information about an actor, for its own methods."""

    handle: Any
    """The actor's own handle, to pass to others or to call itself."""
    id: str
    """Id of the actor, 32 hex digits."""
    node: str
    """Id of the actor's node."""
    restarts: int
    """Number of times that the actor has been started again."""


def current_actor() -> CurrentActor:
    """Describe the actor whose method is running.

    Raises:
        NotInitialized: the caller is not a method of an actor.
    """
    host = current_host.get()
    if host is None or host.info is None:
        raise NotInitialized("zc.current_actor() works inside an actor's methods only; this is not one")
    info = host.info
    return CurrentActor(info.handle, info.actor_id.hex(), info.node, info.restarts)
