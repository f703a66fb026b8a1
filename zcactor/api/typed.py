"""The static types of remote methods, as mypy and pyright see them in a handle.

Three facts shape them. mypy ignores the return type of a class decorator while pyright honours it, so
`zcactor.api.actor.actor` has overloads and a mypy plugin; a handle is typed as the actor's own class, so the remote
signature lives in the descriptor type `Method`; and an `ObjectRef` of a ``T`` is accepted where a method takes a ``T``,
for which `TypedMethod.__call__` has overloads. Nothing here exists at run time beyond its name: handles are
`zcactor.api.handle.ActorHandle`, and `@zc.method` leaves the function as it is.
"""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    overload,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from zcactor.api.binding import GraphNode
    from zcactor.api.future import ObjectRef
    from zcactor.api.stream import ObjectStream
    from zcactor.options import CallOptions

__all__ = ["Method", "MethodDecorator", "StreamMethod", "TypedMethod", "TypedStream"]

P = ParamSpec("P")
Q = ParamSpec("Q")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
S_co = TypeVar("S_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)


def _static_only() -> NoReturn:
    raise TypeError("this class exists for type checkers; handles are zcactor.api.handle.ActorHandle")


class Takes1(Protocol[A_contra, Q, R_co]):
    """A protocol that gives mypy the type of the first positional argument. mypy solves that for Concatenate only."""

    def _signature(self, first: A_contra, /, *args: Q.args, **kwargs: Q.kwargs) -> R_co: ...


class Takes2(Protocol[A_contra, B_contra, Q, R_co]):
    """Like `Takes1`, for the first two positional arguments."""

    def _signature(self, first: A_contra, second: B_contra, /, *args: Q.args, **kwargs: Q.kwargs) -> R_co: ...


class Takes3(Protocol[A_contra, B_contra, C_contra, Q, R_co]):
    """Like `Takes1`, for the first three positional arguments."""

    def _signature(
        self, first: A_contra, second: B_contra, third: C_contra, /, *args: Q.args, **kwargs: Q.kwargs
    ) -> R_co: ...


class TypedMethod(Generic[P, R_co]):
    """A method of a handle: calling it sends the call and returns a reference to the result.

    The first overload is the method's own signature. The others admit a reference for each of the first three
    positional arguments; ParamSpec cannot express references in later positions or passed by keyword.
    """

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R_co]: ...
    @overload
    def __call__(
        self: Takes1[A, Q, R], first: A | ObjectRef[A], /, *args: Q.args, **kwargs: Q.kwargs
    ) -> ObjectRef[R]: ...
    @overload
    def __call__(
        self: Takes2[A, B, Q, R],
        first: A | ObjectRef[A],
        second: B | ObjectRef[B],
        /,
        *args: Q.args,
        **kwargs: Q.kwargs,
    ) -> ObjectRef[R]: ...
    @overload
    def __call__(
        self: Takes3[A, B, C, Q, R],
        first: A | ObjectRef[A],
        second: B | ObjectRef[B],
        third: C | ObjectRef[C],
        /,
        *args: Q.args,
        **kwargs: Q.kwargs,
    ) -> ObjectRef[R]: ...
    # mypy compares overloads that are typed by `self` wrongly with their implementation
    def __call__(self: Any, *args: Any, **kwargs: Any) -> ObjectRef[Any]:  # type: ignore[misc]
        _static_only()

    def _signature(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        _static_only()

    def bind(self, *args: Any, **kwargs: Any) -> GraphNode:
        """The node of a graph; see `zcactor.api.remote_method.RemoteMethod.bind`."""
        _static_only()

    def options(self, **options: Unpack[CallOptions]) -> TypedMethod[P, R_co]:
        """The same method with other options for its calls."""
        _static_only()


class TypedStream(Generic[P, T_co]):
    """A generator method of a handle: calling it starts the generator and returns a stream. Overloads as in
    `TypedMethod`."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ObjectStream[T_co]: ...
    @overload
    def __call__(
        self: Takes1[A, Q, T], first: A | ObjectRef[A], /, *args: Q.args, **kwargs: Q.kwargs
    ) -> ObjectStream[T]: ...
    @overload
    def __call__(
        self: Takes2[A, B, Q, T],
        first: A | ObjectRef[A],
        second: B | ObjectRef[B],
        /,
        *args: Q.args,
        **kwargs: Q.kwargs,
    ) -> ObjectStream[T]: ...
    @overload
    def __call__(
        self: Takes3[A, B, C, Q, T],
        first: A | ObjectRef[A],
        second: B | ObjectRef[B],
        third: C | ObjectRef[C],
        /,
        *args: Q.args,
        **kwargs: Q.kwargs,
    ) -> ObjectStream[T]: ...
    # mypy compares overloads that are typed by `self` wrongly with their implementation
    def __call__(self: Any, *args: Any, **kwargs: Any) -> ObjectStream[Any]:  # type: ignore[misc]
        _static_only()

    def _signature(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        _static_only()

    def options(self, **options: Unpack[CallOptions]) -> TypedStream[P, T_co]:
        """The same method with other options for its calls."""
        _static_only()


class Method(Generic[S_co, P, R_co]):
    """The descriptor that `@zc.method` puts in the class."""

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any]) -> TypedMethod[P, R_co]: ...
    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        _static_only()


class StreamMethod(Generic[S_co, P, T_co]):
    """`Method` of a generator or async generator function."""

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any]) -> TypedStream[P, T_co]: ...
    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        _static_only()


class MethodDecorator(Protocol):
    """The type of `@zc.method`, with or without options. Type checkers test the overloads in this order."""

    @overload
    def __call__(self, function: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /) -> Method[S, P, R]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[S, P], AsyncIterator[T]], /
    ) -> StreamMethod[S, P, T]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[S, P], Iterator[T]], /
    ) -> StreamMethod[S, P, T]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, P], R], /) -> Method[S, P, R]: ...
