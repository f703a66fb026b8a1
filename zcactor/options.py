"""The options of actors, methods and calls: their types, their limits, and errors that name the valid options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, Final, Literal, TypedDict

import msgspec

from zcactor.errors import ProtocolError
from zcactor.exception_pickling import hides, shown_class
from zcactor.sizes import LONGEST_NAME

__tracebackhide__ = hides
__all__ = [
    "ActorDeclaration",
    "ActorSpec",
    "CallOptions",
    "MethodOptions",
    "SpawnOptions",
    "accepted",
    "check_can_be_sent",
    "check_options",
    "check_together",
    "checked_name",
    "checked_seconds",
]

_MOST: Final = (1 << 63) - 1
"""The greatest integer that processes tell each other."""
_SHOWN: Final = 200
"""Characters of a wrong value that a message shows: a peer may send one of any length."""


class SpawnOptions(TypedDict, total=False):
    """Options of one actor: ``Shard.options(...)``."""

    name: str | None
    """Name by which `zc.get_actor` finds the actor; unique in its namespace. Default: None, no name."""
    namespace: str | None
    """Namespace of the name. Default: the namespace of `zc.init`."""
    get_if_exists: bool
    """Return the living actor of that name instead of raising `NameTaken`. Default: False."""
    lifetime: Literal["owned", "detached"]
    """``"owned"`` (default): the actor ends with the process that spawned it, and an unnamed actor also ends when its
    last handle is dropped. ``"detached"``: it outlives them."""
    num_cpus: float
    """CPUs that are reserved until the actor ends. In a process of its own, numeric libraries use as many threads,
    rounded up, unless the environment says how many (``OMP_NUM_THREADS``, ``OPENBLAS_NUM_THREADS`` and the like).
    Default: 0, which reserves nothing and bounds no threads."""
    num_gpus: float
    """GPUs of the actor until it ends: ``CUDA_VISIBLE_DEVICES`` names them in its process. A number below 1 is a share
    of one GPU, above 1 it must be whole. Default: 0, for an actor that sees all GPUs of its node."""
    resources: Mapping[str, float]
    """Amounts of custom resources that are reserved until the actor ends, by name."""
    node: str | None
    """Placement: a node id, ``"spread"`` or ``"pack"``."""
    process: Literal["own", "shared"]
    """``"own"`` (default): a process of its own. ``"shared"``: a process that the actor shares with other such
    actors."""
    max_concurrency: int
    """Number of calls that run at the same time. Default: 1 for sync methods, 1 000 for async methods."""
    max_pending_calls: int
    """Number of unfinished calls that one caller may have; one more raises `MailboxFull`."""
    max_restarts: int
    """Number of times that a dead actor is started again; -1: always. Default: 0."""
    max_retries: int
    """Default for the ``retries`` of the actor's idempotent methods."""
    env: Mapping[str, str]
    """Environment variables of the actor's process. It is a fork of a running one: numbers of threads take effect in
    NumPy, too, and variables that are read when a process starts (``PYTHONHASHSEED``, ``LD_PRELOAD``) only in programs
    that the actor starts, which is logged."""
    on_hang: Literal["none", "kill"]
    """``"kill"``: kill the actor's process when it stops responding. ``"none"``: let it be."""


class ActorDeclaration(SpawnOptions, total=False):
    """Options of an actor class, ``@zc.actor(...)``: the options of its actors, and those that only the class can
    set."""

    concurrency_groups: Mapping[str, int]
    """Groups of methods, by name, each with its own number of calls that run at the same time."""


class CallOptions(TypedDict, total=False):
    """Options of one call: ``handle.method.options(...)``."""

    timeout: float | None
    """Seconds until the call raises `DeadlineExceeded`; None waits for ever."""
    retries: int
    """Number of times that a call whose actor was lost is sent again; needs ``idempotent=True``."""
    idempotent: bool
    """Whether running the call twice has the same effect as running it once."""


class MethodOptions(CallOptions, total=False):
    """Options of one method: ``@zc.method(...)``."""

    concurrency_group: str
    """Name of one of the actor's ``concurrency_groups``."""
    inline: bool
    """Run a short sync method on the actor's loop, which saves the hand-over to its thread."""


def _exact(value: Any) -> Any:
    """A value of an option as one of Python's own types, such as a number or a text of NumPy's."""
    if isinstance(value, Mapping):
        return {_exact(key): _exact(each) for key, each in value.items()}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


class ActorSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """All options of one actor, as its spawner, the head and the worker have them, and as the head's log keeps them.

    An option that another version of zcactor lacks is left out there.
    """

    namespace: str
    name: str | None = None
    get_if_exists: bool = False
    lifetime: Literal["owned", "detached"] = "owned"
    num_cpus: float = 0
    num_gpus: float = 0
    resources: dict[str, float] = {}
    node: str | None = None
    process: Literal["own", "shared"] = "own"
    max_concurrency: int | None = None
    max_pending_calls: int | None = None
    max_restarts: int = 0
    max_retries: int = 0
    env: dict[str, str] = {}
    on_hang: Literal["none", "kill"] = "none"
    concurrency_groups: dict[str, int] = {}
    log_level: int | None = None
    """The level of the spawner's root logger; None for that of a new process."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ActorSpec:
        """The spec of checked options; see `check_options`."""
        return cls(**{name: _exact(value) for name, value in options.items()})

    def plain(self) -> dict[str, Any]:
        """The options that differ from their defaults, for the wire."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]

    @classmethod
    def from_plain(cls, plain: object) -> ActorSpec:
        """The result of `plain`, from a peer.

        Raises:
            ProtocolError: `plain` has another form, or an option has a value that its spawner could not have given; the
                message names both.
        """
        try:
            spec = msgspec.convert(plain, cls)
            options = spec.plain()
            for name, check in _DECLARATION.items():
                if name in options:
                    _checked(f"option {name!r}", name, check, options[name])
            check_together("in one spawn", options)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise ProtocolError(f"the options of an actor are malformed: {error}") from error
        return spec


def checked_seconds(timeout: Any, what: str) -> float | None:
    """Return a time limit as a float, infinite for a number above all floats; None stays None.

    Args:
        timeout: the argument of a caller: None, or any real number of seconds, of Python or NumPy.
        what: the callee, for messages.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative or not a number (NaN).
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"{what}: timeout is {timeout!r}; it takes seconds as a number, or None")
    number: Any = timeout  # mypy knows no operations of Real
    try:
        seconds = float(number)
    except OverflowError:  # of an int
        seconds = float("inf" if number > 0 else "-inf")
    if not seconds >= 0:
        raise ValueError(f"{what}: timeout is {timeout!r}; it takes seconds of at least 0, or None")
    return seconds


def _is_number(value: Any) -> bool:
    # An int may exceed each float, and computing with it would fail.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_NAME


_Check = tuple[str, Callable[[Any], bool]]


def _map_to(expected: str, good: Callable[[Any], bool]) -> _Check:
    def is_one(value: Any) -> bool:
        return isinstance(value, Mapping) and all(_is_name(k) and good(v) for k, v in value.items())

    return f"a mapping of str, of {LONGEST_NAME:,} characters at most, to {expected}", is_one


def _one_of(*texts: str) -> _Check:
    return " or ".join(map(repr, texts)), lambda v: isinstance(v, str) and v in texts


_NAME: _Check = (
    f"a str of 1 to {LONGEST_NAME:,} characters, or None", lambda v: v is None or (_is_name(v) and v != ""),
)  # fmt: skip
_A_NAME: _Check = (f"a str of 1 to {LONGEST_NAME:,} characters", lambda v: _is_name(v) and v != "")
_SPAWN: dict[str, _Check] = {
    "name": _NAME,
    "namespace": _NAME,
    "get_if_exists": ("a bool", lambda v: isinstance(v, bool)),
    "lifetime": _one_of("owned", "detached"),
    "num_cpus": ("a finite number >= 0", _is_number),
    "num_gpus": ("a finite number >= 0", _is_number),
    "resources": _map_to("finite numbers >= 0", _is_number),
    "node": _NAME,
    "process": _one_of("own", "shared"),
    "max_concurrency": ("an int >= 1", lambda v: _is_count(v, 1)),
    "max_pending_calls": ("an int >= 1", lambda v: _is_count(v, 1)),
    "max_restarts": ("an int >= -1", lambda v: _is_count(v, -1)),
    "max_retries": ("an int >= 0", _is_count),
    "env": _map_to("str", lambda v: isinstance(v, str)),
    "on_hang": _one_of("none", "kill"),
}
_DECLARATION: dict[str, _Check] = _SPAWN | {
    "concurrency_groups": _map_to("ints >= 1", lambda v: _is_count(v, 1)),
}
_CALL: dict[str, _Check] = {
    "timeout": ("seconds > 0 or None", lambda v: v is None or (_is_number(v) and v > 0)),
    "retries": ("an int >= 0", _is_count),
    "idempotent": ("a bool", lambda v: isinstance(v, bool)),
}
_METHOD: dict[str, _Check] = _CALL | {
    "concurrency_group": _A_NAME,
    "inline": ("a bool", lambda v: isinstance(v, bool)),
}
_TABLES = {"spawn": _SPAWN, "declaration": _DECLARATION, "call": _CALL, "method": _METHOD}


def accepted(table: str) -> Mapping[str, str]:
    """The values that each option takes, in words.

    Args:
        table: ``"spawn"``, ``"declaration"``, ``"call"`` or ``"method"``.
    """
    return {name: expected for name, (expected, _) in _TABLES[table].items()}


def check_options(table: str, where: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names of `options` and the types of their values.

    Args:
        table: ``"spawn"``, ``"declaration"``, ``"call"`` or ``"method"``.
        where: the place that the error names, for instance ``"Shard.options"``.

    Returns:
        The options with values of Python's own types. Each value was read once: a mapping of the caller's may give
        other items at another time.

    Raises:
        TypeError: an unknown option, or a value of the wrong type. The message lists all options, and the closest one.
        ValueError: a value that no other process can be told, or variables that no process can have.
    """
    known = _TABLES[table]
    checked: dict[str, Any] = {}
    for name, value in options.items():
        check = known.get(name)
        if check is None:
            import difflib  # for the message only

            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise TypeError(f"{where}: unknown option {name!r}{hint} Valid options: {', '.join(known)}")
        try:
            checked[name] = _checked(f"{where}: option {name!r}", name, check, value)
        except TypeError as error:
            raise TypeError(f"{error}. Valid options: {', '.join(known)}") from None
    return checked


def checked_name(what: str, value: Any) -> str:
    """A name by which something is asked for, as a plain str: the one that is asked must not meet a class of the
    asker's.

    Args:
        what: the name's part in the request, for messages.
        value: the name that was given, of an actor, a namespace or a node.

    Raises:
        TypeError: it is no str, or not of 1 to `LONGEST_NAME` characters.
        ValueError: it has a lone surrogate.
    """
    return _checked(what, "name", _A_NAME, value)  # type: ignore[no-any-return]


def _checked(what: str, name: str, check: _Check, value: Any) -> Any:
    """The value of an option as one of Python's own types.

    Raises:
        TypeError: it has the wrong type, or lies outside of the limits.
        ValueError: no other process can be told it, or no process can have such variables.
    """
    expected, good = check
    own = _exact(value)
    if not good(own):
        raise TypeError(f"{what} must be {expected}, got {_shown(own)} ({shown_class(type(value))})")
    if name != "timeout":  # a deadline that never comes is not sent
        check_can_be_sent(what, own)
    if name == "env":
        _check_variables(what, own)
    return own


def _shown(value: Any) -> str:
    try:
        shown = repr(value)
    except Exception:  # of the user's class, or of an int with thousands of digits
        return object.__repr__(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}... ({len(shown):,} characters)"


def check_can_be_sent(what: str, value: Any) -> None:
    """Check that other processes can be told a value from the user's program.

    Args:
        what: the name of the value, for messages.
        value: a text, a number, a mapping of these, or another value, which always passes.

    Raises:
        ValueError: a text in it cannot be encoded in UTF-8, or an integer in it is too large.
    """
    if isinstance(value, Mapping):
        for key, each in value.items():
            check_can_be_sent(f"{what}: a key", key)
            check_can_be_sent(f"{what}: the value of {key!r}", each)
    elif isinstance(value, int) and value > _MOST:
        got = f"{value:,}" if value.bit_length() <= _SHOWN else f"one of {value.bit_length():,} bits"
        raise ValueError(f"{what} must be at most {_MOST:,} as an int, got {got}")
    elif isinstance(value, str):
        try:
            str.encode(value)
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{what} must be a text that UTF-8 can encode, got {value!r}: it has a lone surrogate at place "
                f"{error.start}"
            ) from None


def _check_variables(what: str, env: Mapping[str, str]) -> None:
    """Check that a process can have these environment variables; see environ(7).

    Raises:
        ValueError: it cannot.
    """
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            raise ValueError(
                f"{what}: {name!r} (for {value!r}) cannot be the name of a variable, which has at least one character "
                "and neither '=' nor a zero"
            )
        if "\0" in value:
            raise ValueError(f"{what}: the value of {name!r} is {value!r}, and the value of a variable has no zero")


def check_together(where: str, options: Mapping[str, Any]) -> None:
    """Check that `options`, which are all that apply to one actor, method or call, do not contradict each other.

    Raises:
        ValueError: two options contradict each other.
    """
    if options.get("retries") and not options.get("idempotent"):
        raise ValueError(f"{where}: retries needs idempotent=True, because a retried call may run twice")
    if options.get("get_if_exists") and not options.get("name"):
        raise ValueError(f"{where}: get_if_exists needs a name")
    if options.get("env") and options.get("process") == "shared":
        raise ValueError(f"{where}: env needs process='own': a shared process has one environment for all its actors")
    gpus = options.get("num_gpus") or 0
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(
            f"{where}: num_gpus={gpus:g}: above 1 it must be a whole number, as actors share single GPUs only; choose "
            f"{int(gpus)} or {int(gpus) + 1}"
        )
    if gpus and options.get("process") == "shared":
        raise ValueError(
            f"{where}: num_gpus needs process='own': CUDA_VISIBLE_DEVICES gives GPUs to a process, and a shared "
            "process has one environment for all its actors"
        )
