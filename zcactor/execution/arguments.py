"""The arguments of calls that have arrived: payloads are unpacked when the method runs, promises are fetched before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.api.passing import Unresolved
from zcactor.objectstore.ref import RegionKind
from zcactor.rpc.messages import Flags

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.marshal import Marshaller
    from zcactor.rpc.incoming import Incoming

__all__ = ["Arguments"]

_NO_KWARGS: dict[str, Any] = {}
_KWARGS = int(Flags.KWARGS)


class Arguments:
    """The arguments of one actor's calls.

    Args:
        marshaller: unpacks payloads.
        unblocked: called on the loop when the promises in a call's arguments have arrived.
    """

    def __init__(self, marshaller: Marshaller, unblocked: Callable[[Incoming], None]) -> None:
        self._unpack = marshaller.unpack
        self._unblocked = unblocked

    def prepare(self, incoming: Incoming) -> None:
        """Start to fetch the promises among the top-level arguments; `incoming.blockers` counts them. A second call
        changes nothing."""
        if type(incoming.payload) is _Prepared or not any(part.kind == RegionKind.REF for part in incoming.parts):
            return
        try:
            arguments = self._unpack(incoming.payload, incoming.parts, incoming.flags, True)
        except BaseException as error:  # unpickling may raise anything, and that is raised where the method would run
            incoming.payload = _Prepared(error)
            return
        incoming.payload = _Prepared(arguments)
        self.wait(incoming, arguments)

    def wait(self, incoming: Incoming, arguments: list[Any]) -> None:
        """Make a call wait for the promises among its unpacked arguments."""
        named = incoming.flags & _KWARGS
        values = arguments[:-1] + list(arguments[-1].values()) if named else arguments
        promises = [value.call for value in values if type(value) is Unresolved]
        if not promises and not named:
            return
        if type(incoming.payload) is list:
            incoming.payload = _Prepared(arguments)
        waiting = [call for call in promises if not call.done]
        if not waiting:
            return
        incoming.blockers += len(waiting)

        def arrived(_: Any) -> None:
            incoming.blockers -= 1
            if incoming.blockers == 0:
                self._unblocked(incoming)

        for call in waiting:
            call.add_callback(arrived)

    def hold(self, incoming: Incoming, arguments: list[Any]) -> None:
        """Keep the arguments of a plain call, with promises among them that are resolved when the method runs."""
        incoming.payload = _Prepared(arguments)

    def take(self, incoming: Incoming) -> tuple[list[Any], dict[str, Any]]:
        """Take positional and keyword arguments out of `incoming`. Raises the exceptions of unpacking, and the failure
        of a promise among the arguments."""
        payload = incoming.payload
        if type(payload) is list:
            return payload, _NO_KWARGS
        prepared = type(payload) is _Prepared
        values = payload.take() if prepared else self._unpack(payload, incoming.parts, incoming.flags, True)
        incoming.payload = b""
        incoming.parts = ()
        if incoming.flags & _KWARGS:
            return values[:-1], values[-1]
        return values, _NO_KWARGS


class _Prepared:
    """Arguments unpacked ahead of the call, with promises among them; or the exception of unpacking."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def take(self) -> list[Any]:
        if isinstance(self._value, BaseException):
            raise self._value
        values = self._value
        if values and type(values[-1]) is dict:
            values[-1] = {key: _resolved(value) for key, value in values[-1].items()}
        return [_resolved(value) for value in values]


def _resolved(value: Any) -> Any:
    return value.value() if type(value) is Unresolved else value
