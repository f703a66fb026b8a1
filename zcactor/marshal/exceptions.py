"""The reduction of exceptions for a pickle, at any depth of a value, with any signature of their constructors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import RemoteError, make_remote_error
from zcactor.exception_pickling import fill, has_own_reduction, make, take_apart, text_of, type_name

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Exceptions"]

CHAIN: Final = 16
"""Causes and contexts in a row that travel, at most: each is a level of the pickler's recursion. The text has all."""


class _Found:
    """An exception within a value: its place in a row of causes, and its reduction, once that is made."""

    __slots__ = ("depth", "error", "reduction")

    def __init__(self, error: BaseException, depth: int) -> None:
        self.error = error
        self.depth = depth
        self.reduction: Any = None


class Exceptions:
    """The exceptions of one value on its way out.

    Args:
        attempt: ``attempt(part)`` returns the exception of pickling one part of an exception on its own; None when the
            part can be pickled. Parts that cannot be are left behind then, and named in a note. Without `attempt` the
            whole value fails.
    """

    __slots__ = ("_attempt", "found")

    def __init__(self, attempt: Callable[[Any], BaseException | None] | None) -> None:
        self._attempt = attempt
        self.found: dict[int, _Found] = {}
        """The exceptions found so far, by id."""

    def reduce(self, error: BaseException) -> Any:
        """The reduction of an exception, for ``reducer_override`` of a pickler."""
        found = self.found.get(id(error))
        if found is None:
            found = self.found[id(error)] = _Found(error, 0)
        if found.reduction is not None:
            return found.reduction
        cls, attempt = type(error), self._attempt
        own = has_own_reduction(cls)
        if attempt is None:
            return NotImplemented if own else self._reduced(found, *take_apart(error))
        if own:
            found.reduction = NotImplemented
            if attempt(error) is None:
                return NotImplemented
            if issubclass(cls, RemoteError):
                found.reduction = _as_text(error)
                return found.reduction
        found.reduction = make, (cls, ())  # where it is met again further down
        found.reduction = self._without(found, attempt)
        return found.reduction

    def _reduced(self, found: _Found, cls: type, parts: tuple[Any, ...], state: dict[str, Any]) -> Any:
        for name in ("cause", "context"):
            linked = state.get(name)
            if linked is None:
                continue
            if found.depth >= CHAIN:
                del state[name]
            elif id(linked) not in self.found:
                self.found[id(linked)] = _Found(linked, found.depth + 1)
        return make, (cls, parts), state, None, None, fill

    def _without(self, found: _Found, attempt: Callable[[Any], BaseException | None]) -> Any:
        """The reduction without the parts that cannot be pickled."""
        left: list[str] = []

        def travels(what: str, value: Any) -> bool:
            reason = attempt(value)
            if reason is not None:
                left.append(f"{what} ({type_name(type(reason))}: {text_of(reason)})")
            return reason is None

        reduced = self._reduced(found, *take_apart(found.error))
        (make_it, (cls, parts), state, *rest) = reduced
        args = state["args"]
        if parts:
            message, within = parts
            within = [each if attempt(each) is None else _Stand(each) for each in within]
            parts = message, within
            args = parts if len(args) == 2 else args
        state["args"] = tuple(
            each if travels(f"args[{place}]", each) else f"<{type_name(type(each))}>" for place, each in enumerate(args)
        )
        for kind in ("native", "fields"):
            state[kind] = {name: value for name, value in state[kind].items() if travels(f"field {name!r}", value)}
        for name in ("cause", "context"):
            if name in state and not travels(f"__{name}__", state[name]):
                del state[name]
        if left:
            notes = state["fields"].get("__notes__")
            told = f"left behind, as it cannot be pickled: {'; '.join(left)}"
            state["fields"]["__notes__"] = [*(notes if type(notes) is list else ()), told]
        return (make_it, (cls, parts), state, *rest)


class _Stand:
    """The place of a group's exception that cannot be pickled in any part, as its class cannot."""

    __slots__ = ("_reduction",)

    def __init__(self, error: BaseException) -> None:
        self._reduction = _as_text(error)

    def __reduce__(self) -> Any:
        return self._reduction


def _as_text(error: BaseException) -> Any:
    """The reduction of an exception to a plain `RemoteError`, which has its name and text."""
    fields = {"type_name": type_name(type(error)), "message": text_of(error), "remote_traceback": ""}
    return make_remote_error, (None, {**fields, "actor": "", "host": "", "pid": 0})
