"""A method of a handle: calling it sends the call at once."""

from __future__ import annotations

import contextlib
import inspect
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from zcactor.api.binding import GraphNode, bind
from zcactor.api.future import ObjectRef
from zcactor.exception_pickling import hides, shown
from zcactor.options import check_options
from zcactor.process.context import call_deadline
from zcactor.rpc.call import Call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.api.remote_actor import RemoteActor
    from zcactor.interface import MethodSpec

__tracebackhide__ = hides
__all__ = ["RemoteMethod", "document"]

_new_ref, _new_call = ObjectRef.__new__, Call.__new__


class RemoteMethod:
    """A method of a handle. Calling it sends the call at once and returns an `ObjectRef`.

    It is a value, as a handle is: it compares, hashes, and can be passed to other actors, as a callback for instance.
    """

    __slots__ = ("_actor", "_options", "_plain", "_retries", "_spec", "_timeout")

    def __init__(self, actor: RemoteActor, spec: MethodSpec, options: Mapping[str, Any] | None = None) -> None:
        self._actor = actor
        self._spec = spec
        options = self._options = dict(options or {})
        self._timeout: float | None = options.get("timeout", spec.timeout)
        retries = options.get("retries", spec.retries)
        idempotent = options.get("idempotent", spec.idempotent)
        if options.get("retries") and not idempotent:
            raise ValueError(
                f"{spec.label}.options: retries needs idempotent=True, because a retried call may run twice"
            )
        self._retries = (actor.max_retries if retries is None else retries) if idempotent else 0
        self._plain = self._timeout is None and not self._retries

    def __call__(self, /, *args: Any, **kwargs: Any) -> ObjectRef[Any]:
        spec = self._spec
        if kwargs or not spec.low <= len(args) <= spec.high:
            spec.check(args, kwargs)
        elif self._plain:
            # The native path, for plain arguments; `RemoteActor.call` does the same for all. Code is written out here
            # instead of called, because after a context switch a Python function costs a multiple of its warm time.
            actor = self._actor
            route = actor.route
            if route is not None and call_deadline.get() is None:
                session, index = route
                process = actor.process
                call = _new_call(Call)
                call.owner = process.process
                call.loop = process.loop
                call.thread = process.thread
                call.label = spec.label
                call.target = actor
                call.on_done = actor.closed
                call.refs = 1
                unfinished = actor.unfinished
                sent: bool | None = False
                try:
                    unfinished.add(call)  # within, as a signal's handler may raise as soon as it is there
                    if len(unfinished) <= actor.max_pending:
                        sent = session.wire.call(call, index, spec.code, args)
                        if sent is None:  # there are references among the arguments
                            sent = process.pushes.call(call, session, index, spec.code, args)
                except BaseException:  # the call cannot be sent, and does not count
                    unfinished.discard(call)
                    raise
                if sent:
                    ref: ObjectRef[Any] = _new_ref(ObjectRef)
                    ref._call = call
                    ref._drivers = None
                    return ref
                unfinished.discard(call)
        call = self._actor.call(spec, args, kwargs, self._timeout, self._retries)
        ref = ObjectRef(call)
        call.retrieved = False
        return ref

    def bind(self, *args: Any, **kwargs: Any) -> GraphNode:
        """Make a node of a graph: the result of this method in each run; see `zcactor.graph`. Nothing is sent.

        Args:
            args, kwargs: the arguments: nodes of one graph, whose values differ from run to run, and constants, which
                travel once, when the graph is compiled. The method's own timeout and retries do not apply in a graph.

        Raises:
            TypeError: the arguments do not fit the method, it is a generator method, or a node lies within a container.
            ValueError: the nodes belong to different graphs, there is none and no graph is being built, or the method
                was given options.
        """
        if self._options:
            raise ValueError(f"{self._spec.label}.bind(): calls of a graph have no options; give its runs a timeout")
        return bind(self._actor, self._spec, args, kwargs)

    def options(self, **options: Any) -> RemoteMethod:
        """Give the calls of this method other options, see `zcactor.options.CallOptions`. Nothing is sent.

        Args:
            options: ``timeout`` in seconds, ``retries``, ``idempotent``.

        Returns:
            The same method with these options in place of those of the same names.

        Raises:
            TypeError: an unknown option or a value of the wrong type.
            ValueError: ``retries`` without ``idempotent=True``.
        """
        checked = check_options("call", f"{self._spec.label}.options", options)
        return type(self)(self._actor, self._spec, {**self._options, **checked})

    @property
    def __name__(self) -> str:
        """The method's name."""
        return self._spec.name

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RemoteMethod):
            return NotImplemented
        mine = self._actor.actor_id, self._spec.name, self._options
        return mine == (other._actor.actor_id, other._spec.name, other._options)

    def __hash__(self) -> int:
        return hash((self._actor.actor_id, self._spec.name))

    def __repr__(self) -> str:
        spec = self._spec
        parameters = spec.shown.removeprefix(shown(spec.name))
        return f"<remote method {spec.label}{parameters} of {self._actor.label}>"


class _Doc:
    """The docstring of `RemoteMethod`, and of each method the actor's own."""

    def __init__(self, text: str | None) -> None:
        self._text = text

    def __get__(self, method: RemoteMethod | None, _: type) -> str | None:
        if method is None:
            return self._text
        function = _function(method)
        own = None if function is None else inspect.getdoc(function)
        return own or f"{method._spec.label}: a method of {method._actor.label}."


class _Signature:
    """The signature of each method, with the types and defaults of the actor's class where this process knows it."""

    def __get__(self, method: RemoteMethod | None, _: type) -> inspect.Signature:
        if method is None:
            raise AttributeError("__signature__")  # the class's own is that of its constructor
        function = _function(method)
        if function is not None:
            with contextlib.suppress(TypeError, ValueError):  # a callable without a signature
                return inspect.signature(function)
        return method._spec.signature


def _function(method: RemoteMethod) -> Any:
    """The method of the actor's class, without ``self``; None where this process does not know the class."""
    cls = method._actor.interface.class_of()
    if cls is None:
        return None
    function = inspect.getattr_static(cls, method._spec.name, None)
    if isinstance(function, FunctionType):
        return MethodType(function, cls)  # any object, as only ``self`` is to be left out
    return getattr(cls, method._spec.name, None)


def document(cls: type[RemoteMethod]) -> None:
    """Give the instances of a class of methods the docstring and the signature of the actor's own methods."""
    cls.__doc__ = _Doc(cls.__doc__)  # type: ignore[assignment]
    setattr(cls, "__signature__", _Signature())  # noqa: B010


document(RemoteMethod)
