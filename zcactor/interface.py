"""The interface of an actor's class, as a handle needs it: its public methods, how each runs, and its parameters.

A process that holds a handle need not be able to import the class: the interface travels with the handle as plain
values.
"""

from __future__ import annotations

import inspect
import sys
from enum import IntEnum
from functools import lru_cache, partialmethod, singledispatchmethod
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakValueDictionary

import msgspec

from zcactor.errors import ProtocolError
from zcactor.exception_pickling import hides, shown
from zcactor.native import hot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__tracebackhide__ = hides
__all__ = ["Interface", "MethodKind", "MethodSpec", "constructor_of", "method_options"]

R = TypeVar("R")

MARK = "__zcactor_method__"
"""Attribute in which `@zc.method` keeps a function's options."""
ADDED = frozenset({"spawn", "options"})
"""Names that `@zc.actor` adds to the class; they are not remote methods."""


REMEMBERED: Final = 256
"""Number of interfaces, and of constructors, that a process remembers."""
MOST_METHODS: Final = 1 << 16
"""Public methods of a class, at most: frames have 16 bits for the number of one."""


class MethodKind(IntEnum):
    """The way in which a method runs."""

    SYNC = 0
    """In the actor's own thread, or in a thread of its shared process; one at a time."""
    ASYNC = 1
    """As a task on the actor's loop."""
    GENERATOR = 2
    """A stream; each step runs where sync methods run."""
    ASYNC_GENERATOR = 3
    """A stream; runs as a task."""
    INLINE = 4
    """A short sync method, on the loop."""


def method_options(function: Any) -> Mapping[str, Any]:
    """The options given to `@zc.method`; empty without that decorator."""
    found = getattr(function, MARK, None)
    return found if type(found) is dict else {}  # a mock has an answer to every name


class MethodSpec:
    """One method as a caller sees it."""

    __slots__ = (
        "_signature",
        "code",
        "group",
        "high",
        "idempotent",
        "kind",
        "label",
        "low",
        "name",
        "parameters",
        "retries",
        "timeout",
    )

    def __init__(
        self, code: int, class_name: str, name: str, kind: int, parameters: list[Any], options: Mapping[str, Any]
    ) -> None:
        self.code = code
        """Index in the interface, by which a CALL frame names the method."""
        self.name = name
        self.label = f"{shown(class_name)}.{shown(name)}"
        self.kind = int(kind)
        self.parameters = parameters
        """``[name, inspect kind, has default]`` of each parameter, without ``self``."""
        self.timeout: float | None = options.get("timeout")
        self.retries: int | None = options.get("retries")
        self.idempotent: bool = bool(options.get("idempotent", False))
        self.group: str = options.get("concurrency_group", "")
        positional = [p for p in parameters if p[1] in (_POSITIONAL_ONLY, _POSITIONAL_OR_KEYWORD)]
        required_keywords = any(p[1] == _KEYWORD_ONLY and not p[2] for p in parameters)
        variadic = any(p[1] == _VAR_POSITIONAL for p in parameters)
        self.low = (1 << 30) if required_keywords else sum(not p[2] for p in positional)
        """Fewest positional arguments of a call without keywords; huge when a keyword is required."""
        self.high = (1 << 30) if variadic else len(positional)
        self._signature: inspect.Signature | None = None

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check a call's arguments against the signature, as a local call does.

        Raises:
            TypeError: the number or the names of the arguments do not fit the signature.
        """
        if not kwargs and self.low <= len(args) <= self.high:
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.label}(): {error}") from None

    @property
    def signature(self) -> inspect.Signature:
        """The parameters without ``self``. A default that callers do not know is ``...``."""
        if self._signature is None:
            self._signature = inspect.Signature(
                [
                    inspect.Parameter(name, _KINDS[kind], default=... if default else inspect.Parameter.empty)
                    for name, kind, default in self.parameters
                ]
            )
        return self._signature

    def argument(self, number: int) -> str:
        """The name of a positional argument, the first of which has the number 1; the number for one of many."""
        for place, (name, how, _) in enumerate(self.parameters, 1):
            if how == _VAR_POSITIONAL:
                break
            if place == number:
                return shown(name)
        return str(number)

    @property
    def shown(self) -> str:
        """The method as messages show it: its name and parameters."""
        return f"{shown(self.name)}({_shown_parameters(self.parameters)})"

    def plain(self) -> list[Any]:
        """The method as plain values, for the wire."""
        return [self.name, int(self.kind), self.parameters, self.timeout, self.retries, self.idempotent, self.group]


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.decode
_KINDS = {int(kind): kind for kind in inspect._ParameterKind}
_POSITIONAL_ONLY = int(inspect.Parameter.POSITIONAL_ONLY)
_POSITIONAL_OR_KEYWORD = int(inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VAR_POSITIONAL = int(inspect.Parameter.VAR_POSITIONAL)
_VAR_KEYWORD = int(inspect.Parameter.VAR_KEYWORD)
_KEYWORD_ONLY = int(inspect.Parameter.KEYWORD_ONLY)
_ANY: Final = [["args", _VAR_POSITIONAL, False], ["kwargs", _VAR_KEYWORD, False]]
"""The parameters of a method whose signature is not known: the actor checks the arguments."""


class Interface:
    """The public methods of one actor class, in the order of their names, and the parameters of its constructor.

    An actor's methods have the numbers of the interface that its spawner declared, for all of its life: it travels with
    each handle and to each process in which the actor starts. There `seen_as` finds the methods by their names where
    the class is another version.
    """

    __slots__ = ("_wire", "by_name", "class_name", "constructor", "is_async", "methods", "refusals")

    def __init__(
        self, class_name: str, methods: list[MethodSpec], is_async: bool, constructor: list[Any],
        refusals: Mapping[int, Exception] | None = None,
    ) -> None:  # fmt: skip
        self.class_name = shown(class_name)
        self.constructor = constructor
        """The constructor's parameters, as in `MethodSpec`."""
        self.refusals = refusals or {}
        """The errors of calls by number, where the class has not the method that callers see."""
        self.methods = methods
        self.is_async = is_async
        """Whether any method is ``async``: then a call whose arguments have not arrived does not hold up later
        calls."""
        self.by_name = {spec.name: spec for spec in methods}
        self._wire = b""

    @classmethod
    def of(cls, actor_class: type) -> Interface:
        """The interface of a class, read once until an attribute of the class or of a base is set. Callers must not
        change it."""
        return _remembered(_interfaces, actor_class, cls._read)

    @classmethod
    def _read(cls, actor_class: type) -> Interface:
        methods: list[MethodSpec] = []
        is_async = False
        for name in sorted(dir(actor_class)):
            if name.startswith("_"):
                continue
            static = inspect.getattr_static(actor_class, name)
            function = static
            bound = hasattr(type(static), "__get__")  # builtins and cached functions bind as functions do
            if isinstance(static, staticmethod | classmethod):
                function, bound = static.__func__, isinstance(static, classmethod)
            elif isinstance(static, partialmethod):
                function = getattr(actor_class, name)
            elif isinstance(static, singledispatchmethod):
                function = static.func
            if not callable(function) or isinstance(function, type):
                continue
            if name in ADDED and getattr(function, "__module__", "") == "zcactor.api.actor":
                continue
            try:
                kind = _kind_of(static.func if isinstance(static, partialmethod) else function)
                described = kind, _parameters(function, bound), method_options(function)
                spec = MethodSpec(len(methods), actor_class.__name__, name, *described)
            except Exception:  # of a callable object that answers for itself, such as a proxy: the actor calls it
                spec = MethodSpec(len(methods), actor_class.__name__, name, MethodKind.SYNC, _ANY, {})
            is_async = is_async or spec.kind in (MethodKind.ASYNC, MethodKind.ASYNC_GENERATOR)
            methods.append(spec)
        if len(methods) > MOST_METHODS:
            raise TypeError(
                f"{shown(actor_class.__name__)} has {len(methods)} public methods, and a class of actors may have "
                f"{MOST_METHODS}; give names with an underscore to those that nobody calls from outside"
            )
        return cls(actor_class.__name__, methods, is_async, constructor_of(actor_class).parameters)

    def find(self, name: str) -> MethodSpec:
        """The method called `name`.

        Raises:
            AttributeError: no method has that name, or the name is private. The message lists the public methods.
        """
        spec = self.by_name.get(name)
        if spec is not None:
            return spec
        if name.startswith("_"):
            raise AttributeError(
                f"{self.class_name}.{shown(name)} is private: an actor's private names cannot be reached from outside",
                name=name,
            )
        public = ", ".join(map(shown, self.by_name)) or "none"
        raise AttributeError(
            f"actor {self.class_name} has no method {name!r} (attributes are not reachable, methods are: {public})",
            name=name,
        )

    def seen_as(self, declared: Interface, actor_class: type) -> Interface:
        """This interface of `actor_class` with the numbers of `declared`, by which callers know it. `refusals` of the
        result has the errors of those methods that do not do what callers expect.

        Raises:
            TypeError: the constructor takes other arguments than the one that `declared` has.
        """
        if self.wire() == declared.wire():
            return self
        if not _takes(self.constructor, declared.constructor):
            raise TypeError(
                f"{self.class_name}({_shown_parameters(declared.constructor)}), as the class of the actor's spawner "
                f"has it, is {self.class_name}({_shown_parameters(self.constructor)}) in the class of the actor's "
                f"process{_origin(actor_class)}; {_REMEDY}"
            )
        methods: list[MethodSpec] = []
        refusals: dict[int, Exception] = {}
        for known in declared.methods:
            spec, code = self.by_name.get(known.name), known.code
            if spec is None:
                spec, refusals[code] = known, self._missing(known, declared, actor_class)
            elif (spec.kind in _STREAMS) != (known.kind in _STREAMS) or not _takes(spec.parameters, known.parameters):
                refusals[code] = TypeError(
                    f"{known.label}() was not called: the handle's class, that of the actor's spawner, has "
                    f"{_shown_kind(known)}, and the class of the actor's process has {_shown_kind(spec)}"
                    f"{_origin(actor_class)}; {_REMEDY}"
                )
            options = {
                "timeout": spec.timeout, "retries": spec.retries, "idempotent": spec.idempotent,
                "concurrency_group": "" if code in refusals else spec.group,
            }  # fmt: skip
            methods.append(MethodSpec(code, self.class_name, known.name, spec.kind, spec.parameters, options))
        return Interface(self.class_name, methods, self.is_async, self.constructor, refusals)

    def _missing(self, known: MethodSpec, declared: Interface, actor_class: type) -> AttributeError:
        found = inspect.getattr_static(actor_class, known.name, None)
        what = f"has {shown(known.name)} as a {type(found).__name__}, and has" if found is not None else "has only"
        return AttributeError(
            f"{known.label}() was not called: the handle's class, that of the actor's spawner, has "
            f"{_listed(declared)}, and the class of the actor's process {what} {_listed(self)}"
            f"{_origin(actor_class)}; {_REMEDY}",
            name=known.name,
        )

    @classmethod
    def declare(cls, actor_class: type) -> bytes:
        """The encoded interface of a class, which `class_of` then finds in this process."""
        wire = cls.of(actor_class).wire()
        _declared[wire] = actor_class
        return wire

    def class_of(self) -> type | None:
        """The class with this interface that was declared last in this process; None where it was in none."""
        return _declared.get(self.wire())

    def wire(self) -> bytes:
        """The encoded form, which `from_wire` decodes. Versions of a class whose calls mean the same have the same."""
        if not self._wire:
            methods = [spec.plain() for spec in self.methods]
            self._wire = _encode((self.class_name, self.is_async, methods, self.constructor))
        return self._wire

    @staticmethod
    @lru_cache(REMEMBERED)
    def from_wire(data: bytes) -> Interface:
        """Decode the result of `wire`. Equal bytes give the same object, because most handles of a process are of few
        classes.

        Raises:
            ProtocolError: `data` is not in the form that `wire` gives.
        """
        try:
            class_name, is_async, methods, constructor = _decode(data)
            if len(methods) > MOST_METHODS:
                raise ValueError(f"it has {len(methods)} methods, and {MOST_METHODS} are possible")
            specs = []
            for code, (name, kind, parameters, timeout, retries, idempotent, group) in enumerate(methods):
                options = {"timeout": timeout, "retries": retries, "idempotent": idempotent, "concurrency_group": group}
                checked = _checked(parameters)
                specs.append(MethodSpec(code, str(class_name), str(name), MethodKind(kind), checked, options))
            return Interface(str(class_name), specs, bool(is_async), _checked(constructor))
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise ProtocolError(f"an actor's interface is malformed: {error}") from error


_declared: Final[WeakValueDictionary[bytes, type]] = WeakValueDictionary()
_POSITIONAL: Final = (_POSITIONAL_ONLY, _POSITIONAL_OR_KEYWORD)
_STARS: Final = {_VAR_POSITIONAL: "*", _VAR_KEYWORD: "**"}
_LISTED: Final = 400
"""Characters of a list of methods that messages show, at most."""
_STREAMS: Final = (MethodKind.GENERATOR, MethodKind.ASYNC_GENERATOR)
_REMEDY: Final = (
    "nothing was run: spawn the actor anew from the version that you want, or give its node and this program the same "
    "version of the class, and start them again"
)


def _checked(parameters: Any) -> list[Any]:
    return [[str(name), int(_KINDS[how]), bool(default)] for name, how, default in parameters]


def _shown_parameters(parameters: list[Any]) -> str:
    texts: list[str] = []
    before = _POSITIONAL_ONLY
    for name, how, default in parameters:
        if texts and before == _POSITIONAL_ONLY != how:
            texts.append("/")
        if how == _KEYWORD_ONLY and before not in (_KEYWORD_ONLY, _VAR_POSITIONAL):
            texts.append("*")
        texts.append(f"{_STARS.get(how, '')}{name}{'=...' if default else ''}")
        before = how
    return shown(", ".join(texts) + (", /" if texts and before == _POSITIONAL_ONLY else ""))


def _shown_kind(spec: MethodSpec) -> str:
    return f"{'the generator ' if spec.kind in _STREAMS else ''}{spec.shown}"


def _listed(interface: Interface) -> str:
    return shown(", ".join(spec.shown for spec in interface.methods), _LISTED) or "no public methods"


def _origin(actor_class: type) -> str:
    path = getattr(sys.modules.get(actor_class.__module__), "__file__", None)
    return f" ({path})" if path else ""


def _takes(actual: list[Any], declared: list[Any]) -> bool:
    """Whether all arguments that fit the parameters `declared` fit `actual`, too, and have the same names there."""
    if actual == declared:
        return True
    theirs, ours = {how for _, how, _ in declared}, {how for _, how, _ in actual}
    if not theirs & _STARS.keys() <= ours:
        return False
    places = [each for each in actual if each[1] in _POSITIONAL]
    by_name = {name: default for name, how, default in actual if how in (_POSITIONAL_OR_KEYWORD, _KEYWORD_ONLY)}
    if _VAR_POSITIONAL in theirs and len(places) > sum(how in _POSITIONAL for _, how, _ in declared):
        return False  # one of them would take an argument beyond those that have names
    same: set[str] = set()
    for place, (name, how, default) in enumerate(declared):  # positional ones come first in a signature
        if how in _POSITIONAL and place < len(places):
            other, kind, optional = places[place]
            if other != name or kind < how or default > optional:
                return False
        elif how == _KEYWORD_ONLY and name in by_name:
            if default > by_name[name]:
                return False
        elif how not in _STARS and (
            name in by_name
            or (how in _POSITIONAL and _VAR_POSITIONAL not in ours)
            or (how != _POSITIONAL_ONLY and _VAR_KEYWORD not in ours)
        ):
            return False
        same.add(name)
    further = [default for name, how, default in actual if how not in _STARS and name not in same]
    return all(further) and not (further and theirs & _STARS.keys())


_interfaces: dict[int, Interface] = {}
_constructors: dict[int, MethodSpec] = {}


def constructor_of(actor_class: type) -> MethodSpec:
    """The signature of a class's constructor, for `MethodSpec.check`; remembered like `Interface.of`."""
    return _remembered(_constructors, actor_class, _read_constructor)


def _read_constructor(actor_class: Any) -> MethodSpec:
    name, init, new, make = actor_class.__name__, actor_class.__init__, actor_class.__new__, type(actor_class).__call__
    if init is object.__init__ and new is object.__new__ and make is type.__call__:
        parameters = []  # `inspect` parses a text then: a tenth of the time in which a new process makes an actor
    else:
        parameters = _parameters(actor_class, False)
    spec = MethodSpec(0, name, "__init__", MethodKind.SYNC, parameters, {})
    spec.label = shown(name)
    return spec


def _remembered(known: dict[int, R], actor_class: type, read: Callable[[type], R]) -> R:
    """The result of ``read(actor_class)``, taken from `known` where the class has not changed since.

    The interpreter numbers the states of all classes for its cache of attributes, and gives no number twice
    (Objects/typeobject.c, ``tp_version_tag``). 0 stands for a class without one, which is read each time.
    """
    version = hot.type_version(actor_class)
    found = known.get(version)
    if found is None:
        found = read(actor_class)
        if version:
            if len(known) >= REMEMBERED:
                known.clear()
            known[version] = found
    return found


def _kind_of(function: Callable[..., Any]) -> MethodKind:
    if inspect.isasyncgenfunction(function):
        return MethodKind.ASYNC_GENERATOR
    if inspect.iscoroutinefunction(function):
        return MethodKind.ASYNC
    if inspect.isgeneratorfunction(function):
        return MethodKind.GENERATOR
    return MethodKind.INLINE if method_options(function).get("inline") else MethodKind.SYNC


def _parameters(function: Callable[..., Any], skip_first: bool) -> list[Any]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return _ANY
    if skip_first and parameters and parameters[0].kind in (_POSITIONAL_ONLY, _POSITIONAL_OR_KEYWORD):
        parameters = parameters[1:]
    return [[p.name, int(p.kind), p.default is not p.empty] for p in parameters]
