"""Services: the methods that processes answer for each other, beside the methods of actors.

A class declares its remote methods by `remote`, each with a number that no other method has: the number is on the wire,
so it never changes and is not used again. `tests/rpc/test_services.py` holds the list. A caller names the method by
its function, as in ``requests.ask(session, Promises.fetch, id)``: an editor finds it, and mypy checks the
arguments. `Services` answers a process's peers by the objects that the process has given it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from zcactor.ids import ProcessId
from zcactor.interface import Interface, MethodKind, MethodSpec
from zcactor.rpc.incoming import NO_ANSWER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zcactor.rpc.session import Session

__all__ = [
    "FIRST_SILENT",
    "SYSTEM_INDEX",
    "Services",
    "caller",
    "calling_process",
    "current_call",
    "method_number",
    "remote",
    "remote_methods",
]

F = TypeVar("F", bound=Callable[..., Any])

SYSTEM_INDEX: Final = 0
"""The index by which CALL frames name the services of a process."""
FIRST_SILENT: Final = 128
"""The methods from this number on give no answer. Those that a process does not have, a newer peer's, are ignored."""
MAX_NUMBER: Final = 255
"""Greatest number of a remote method."""

current_call: ContextVar[Any] = ContextVar("zcactor_current_call", default=None)
"""The `zcactor.rpc.incoming.Incoming` that a remote method serves, if that is a coroutine."""
_declared: dict[int, Callable[..., Any]] = {}
_numbers: dict[object, int] = {}


def caller() -> Session:
    """The session with the process whose call is served. For remote methods that are coroutines."""
    return current_call.get().session  # type: ignore[no-any-return]


def calling_process() -> ProcessId:
    """The process whose call is served. For remote methods that are coroutines."""
    return ProcessId(caller().peer_process)


def remote(number: int) -> Callable[[F], F]:
    """Declare a method of a class as remote. A coroutine function runs as a task of the process's loop, and another
    function at once, on that loop.

    Args:
        number: its number on the wire, at most `MAX_NUMBER`. Methods from `FIRST_SILENT` on give no answer: they return
            None, and their errors can only be logged.

    Raises:
        ValueError: another method has the number, or it is out of range.
    """

    def declare(function: F) -> F:
        if not 0 <= number <= MAX_NUMBER:
            raise ValueError(f"{function.__qualname__} has number {number}, and numbers go from 0 to {MAX_NUMBER}")
        other = _declared.setdefault(number, function)
        if other.__qualname__ != function.__qualname__:  # else its module is loaded anew
            raise ValueError(f"{function.__qualname__} has number {number}, which {other.__qualname__} has")
        _numbers[function] = number
        return function

    return declare


def method_number(method: object) -> int:
    """The number of a declared method.

    Raises:
        KeyError: `remote` has not declared it.
    """
    return _numbers[method]


def remote_methods(service: type) -> Iterator[tuple[str, FunctionType]]:
    """The names and functions of the remote methods that a class or its bases declare."""
    for base in service.__mro__:
        for name, function in vars(base).items():
            if type(function) is FunctionType and function in _numbers:
                yield name, function


class Services:
    """The remote methods of one process, by number, as an `zcactor.execution.actor_runner.ActorRunner` takes them: an
    interface, whose methods have the names of attributes here. Used on the loop's thread.

    Args:
        pid: of the process.
    """

    def __init__(self, pid: int) -> None:
        self.interface = Interface("services", [], True, [])
        self._pid = pid
        self.add(self)

    @remote(0)
    def ping(self) -> int:
        """The pid; answered on the loop."""
        return self._pid

    def add(self, service: object) -> None:
        """Answer calls of the methods that the class of `service` declares. Each call looks its method up."""
        self.add_rare(type(service), lambda: service)

    def add_rare(self, declared: type, part: Callable[[], Any]) -> None:
        """Answer calls of the methods that `declared` declares by the object that ``part()`` returns; the first call
        asks for it."""

        def by(name: str) -> Callable[..., Any]:
            return lambda *args: getattr(part(), name)(*args)

        for name, function in remote_methods(declared):
            self._answer(function, by(name))

    def _answer(self, function: FunctionType, answer: Callable[..., Any]) -> None:
        number, methods = _numbers[function], self.interface.methods
        methods += [
            MethodSpec(unknown, "services", "", MethodKind.INLINE, [], {})
            for unknown in range(len(methods), number + 1)
        ]
        kind = MethodKind.ASYNC if inspect.iscoroutinefunction(function) else MethodKind.INLINE
        methods[number] = MethodSpec(number, "services", function.__qualname__, kind, [], {})
        setattr(self, function.__qualname__, _silently(answer) if number >= FIRST_SILENT else answer)


def _silently(take: Callable[..., object]) -> Callable[..., object]:
    def taken(*args: object) -> object:
        take(*args)
        return NO_ANSWER

    return taken
