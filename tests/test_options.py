"""Options: every unknown name and every wrong value is refused, with a message that teaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from types import MappingProxyType
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest

import zcactor as zc
from zcactor.api.actor import declared_options
from zcactor.errors import ProtocolError
from zcactor.options import (
    _TABLES,
    ActorDeclaration,
    ActorSpec,
    CallOptions,
    MethodOptions,
    SpawnOptions,
    accepted,
    check_options,
    check_together,
    checked_seconds,
)

GOOD: dict[str, list[Any]] = {
    "name": [None, "x", "n" * 1000],
    "namespace": [None, "x", "n" * 1000],
    "get_if_exists": [True, False],
    "lifetime": ["owned", "detached"],
    "num_cpus": [0, 1, 0.5],
    "num_gpus": [0, 2.0],
    "resources": [{}, {"a": 1, "b": 0.5}],
    "node": [None, "spread", "pack", "0" * 32],
    "process": ["own", "shared"],
    "max_concurrency": [1, 1000],
    "max_pending_calls": [1, 10],
    "max_restarts": [-1, 0, 3],
    "max_retries": [0, 3],
    "env": [{}, {"A": "b"}],
    "on_hang": ["none", "kill"],
    "concurrency_groups": [{}, {"io": 4}],
    "timeout": [None, 0.1, 3, 1e300],
    "retries": [0, 3],
    "idempotent": [True, False],
    "concurrency_group": ["io"],
    "inline": [True, False],
}
BAD: dict[str, list[Any]] = {
    "name": ["", 3, b"x", "n" * 1001],
    "namespace": ["", 3, "n" * 1001],
    "get_if_exists": [1, None, "yes"],
    "lifetime": ["forever", None, 1],
    "num_cpus": [-1, float("nan"), float("inf"), True, "1", None],
    "num_gpus": [-1, "1"],
    "resources": [None, [], {"a": -1}, {1: 1}, {"a": "1"}, {"a": True}, {"a": float("inf")}, {"n" * 1001: 1}],
    "node": ["", 5, "n" * 1001],
    "process": ["thread", None],
    "max_concurrency": [0, -1, 1.0, True, None, "2"],
    "max_pending_calls": [0, 2.5, None],
    "max_restarts": [-2, 1.0, None, False],
    "max_retries": [-1, None],
    "env": [None, {"A": 1}, {1: "a"}, []],
    "on_hang": ["restart", None, True],
    "concurrency_groups": [None, {"io": 0}, {"io": 1.0}, {1: 1}, {"n" * 1001: 1}],
    "timeout": [0, -1, float("nan"), float("inf"), 10**400, "1", True],
    "retries": [-1, 1.5, None, True],
    "idempotent": [1, None],
    "concurrency_group": ["", None, 3, "n" * 1001],
    "inline": [1, None],
}
BEYOND: dict[str, list[tuple[Any, str]]] = {
    **{
        name: [("x\udc80", r"must be a text that UTF-8 can encode, got 'x\\udc80': it has a lone surrogate at place 1")]
        for name in ("name", "namespace", "node", "concurrency_group")
    },
    **{
        name: [(each, f"must be at most 9,223,372,036,854,775,807 as an int, got {each:,}") for each in (2**63, 10**30)]
        for name in (
            "num_cpus", "num_gpus", "max_concurrency", "max_pending_calls", "max_restarts", "max_retries",
            "retries",
        )
    },
    "resources": [({"a": 2**63}, "the value of 'a' must be at most"), ({"\udc80": 1}, "a key must be a text")],
    "concurrency_groups": [({"a": 2**63}, "the value of 'a' must be at most"), ({"\udc80": 1}, "a key must be a text")],
    "env": [
        ({"A=B": "x"}, r"'A=B' \(for 'x'\) cannot be the name of a variable"),
        ({"": "x"}, r"'' \(for 'x'\) cannot be the name of a variable"),
        ({"A\0": "x"}, r"'A\\x00' \(for 'x'\) cannot be the name of a variable"),
        ({"A": "x\0"}, r"the value of 'A' is 'x\\x00'"),
        ({"\udc80": "x"}, r"a key must be a text that UTF-8 can encode, got '\\udc80'"),
        ({"A": "\udc80"}, r"the value of 'A' must be a text that UTF-8 can encode, got '\\udc80'"),
    ],
}  # fmt: skip
TYPES = {"spawn": SpawnOptions, "declaration": ActorDeclaration, "call": CallOptions, "method": MethodOptions}


@pytest.mark.parametrize("table", TYPES)
def test_the_checks_know_exactly_the_options_that_types_declare(table: str) -> None:
    assert set(_TABLES[table]) == set(get_type_hints(TYPES[table]))


@pytest.mark.parametrize("table", TYPES)
def test_values(table: str) -> None:
    for name in _TABLES[table]:
        for value in GOOD[name]:
            check_options(table, "Place.options", {name: value})
        for value in BAD[name]:
            with pytest.raises(TypeError) as error:
                check_options(table, "Place.options", {name: value})
            text = str(error.value)
            assert text.startswith(f"Place.options: option {name!r} must be ")
            assert repr(value)[:200] in text and len(text) < 1000
            assert all(known in text for known in _TABLES[table])


@pytest.mark.parametrize("table", TYPES)
def test_values_that_no_other_process_can_have_are_refused_where_they_are_given(table: str) -> None:
    for name in BEYOND.keys() & _TABLES[table].keys():
        for value, text in BEYOND[name]:
            with pytest.raises(ValueError, match=f"Place.options: option {name!r}:? {text}"):
                check_options(table, "Place.options", {name: value})


class Hostile:
    """An object that raises whenever it is looked at."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __repr__(self) -> str:
        raise RuntimeError("shown")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("value", [Hostile(), np.array(["owned"]), np.array(["owned", "own"]), [Hostile()]])
def test_objects_that_raise_are_no_values_of_options(value: Any) -> None:
    for name in _TABLES["spawn"]:
        with pytest.raises(TypeError, match=f"^Place.options: option {name!r} must be "):
            check_options("spawn", "Place.options", {name: value})


def test_numbers_of_numpy_are_numbers() -> None:
    given = {"num_cpus": np.float32(0.5), "max_restarts": np.int64(3), "resources": {"a": np.uint8(2)}}
    checked = check_options("spawn", "Place.options", given)
    assert checked == {"num_cpus": 0.5, "max_restarts": 3, "resources": {"a": 2}}
    assert [type(checked["num_cpus"]), type(checked["max_restarts"])] == [float, int]
    assert check_options("call", "Place.options", {"timeout": np.int64(1)}) == {"timeout": 1}


@pytest.mark.parametrize("name", ["num_cpus", "max_restarts", "max_concurrency"])
def test_numbers_with_thousands_of_digits_name_their_option(name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^Place.options: option {name!r} must be ") as error:
        check_options("spawn", "Place.options", {name: 10**5000})
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("table", TYPES)
def test_unknown_names(table: str) -> None:
    with pytest.raises(TypeError) as error:
        check_options(table, "Place.options", {"zzz": 1})
    text = str(error.value)
    assert text.startswith("Place.options: unknown option 'zzz'. Valid options: ")
    assert all(known in text for known in _TABLES[table])
    for name in _TABLES[table]:
        with pytest.raises(TypeError, match=f"did you mean '{name}'"):
            check_options(table, "Place.options", {f"{name}_": GOOD[name][-1]})


def test_options_of_another_place() -> None:
    for table, name in (("spawn", "timeout"), ("spawn", "concurrency_groups"), ("call", "name"), ("call", "inline")):
        with pytest.raises(TypeError, match="unknown option"):
            check_options(table, "here", {name: GOOD[name][-1]})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"retries": 1}, "needs idempotent=True"),
        ({"retries": 1, "idempotent": False}, "needs idempotent=True"),
        ({"get_if_exists": True}, "needs a name"),
        ({"get_if_exists": True, "name": None}, "needs a name"),
        ({"env": {"A": "b"}, "process": "shared"}, "process='own'"),
        ({"num_gpus": 1, "process": "shared"}, "num_gpus needs process='own': CUDA_VISIBLE_DEVICES"),
        ({"num_gpus": 1.5}, "num_gpus=1.5: .* whole number.*choose 1 or 2"),
    ],
)
def test_contradictions(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_together("here", options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"retries": 0},
        {"retries": 2, "idempotent": True},
        {"get_if_exists": True, "name": "x"},
        {"env": {}, "process": "shared"},
        {"env": {"A": "b"}, "process": "own"},
        {"num_gpus": 0, "process": "shared"},
        {"num_gpus": 2.0},
        {"num_gpus": 0.25},
    ],
)
def test_what_goes_together(options: dict[str, Any]) -> None:
    check_together("here", options)


def test_time_limits_are_real_numbers_of_seconds() -> None:
    assert [checked_seconds(each, "here") for each in (None, 0, np.float32(2))] == [None, 0.0, 2.0]
    assert checked_seconds(10**400, "here") == checked_seconds(inf, "here") == inf
    for kind in ("1", True, 1j, [1]):
        with pytest.raises(TypeError, match="here: timeout is"):
            checked_seconds(kind, "here")
    for value in (-1, -1e-300, -(10**400), np.float32("nan")):
        with pytest.raises(ValueError, match="here: timeout is"):
            checked_seconds(value, "here")


def test_a_spec_goes_to_other_processes_and_comes_back() -> None:
    options = {
        "namespace": "n", "name": np.str_("till"), "num_cpus": np.float64(0.5),
        "resources": MappingProxyType({np.str_("a"): np.float64(1)}),
        "max_restarts": 1, "env": {"A": "1"}, "process": "own",
    }  # fmt: skip
    spec = ActorSpec.of(options)
    plain = spec.plain()
    assert plain == {
        "namespace": "n", "name": "till", "num_cpus": 0.5, "resources": {"a": 1}, "max_restarts": 1, "env": {"A": "1"},
    }  # fmt: skip
    assert ActorSpec.from_plain(plain) == spec
    assert ActorSpec.from_plain({**plain, "of_a_later_version": 5}) == spec


@pytest.mark.parametrize("plain", [{}, {"namespace": 5}, {"namespace": "n", "lifetime": "long"}, b"", None])
def test_a_malformed_spec(plain: object) -> None:
    with pytest.raises(ProtocolError, match="the options of an actor are malformed"):
        ActorSpec.from_plain(plain)


@pytest.mark.parametrize("name", accepted("declaration"))
def test_a_spec_whose_values_no_spawner_could_have_given(name: str) -> None:
    """The error names the option, and also the value where that has the right type."""
    for value in BAD[name]:
        if value is None and name.startswith("max_"):
            continue  # the default
        with pytest.raises(ProtocolError, match=f"the options of an actor are malformed: .*{name}") as error:
            ActorSpec.from_plain({"namespace": "n", name: value})
        assert any(text in str(error.value) for text in ("Expected", "Invalid enum value", ", got "))
        assert len(str(error.value)) < 1000
    for value, text in BEYOND.get(name, ()):
        if name in ("num_cpus", "num_gpus", "resources") and "at most" in text:
            continue  # these are numbers of any kind there
        with pytest.raises(ProtocolError, match=f"the options of an actor are malformed: option '{name}':? {text}"):
            ActorSpec.from_plain({"namespace": "n", name: value})


@pytest.mark.parametrize(
    "together", [{"num_gpus": 1.5}, {"get_if_exists": True}, {"env": {"A": "b"}, "process": "shared"}]
)
def test_a_spec_whose_values_contradict_each_other(together: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="the options of an actor are malformed: .* needs|must be a whole number"):
        ActorSpec.from_plain({"namespace": "n", **together})


class Changing(Mapping[str, Any]):
    """A mapping that gives other items each time that it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, key: str) -> Any:
        self.reads += 1
        return 1 if self.reads == 1 else -1

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


def test_a_mapping_is_read_once() -> None:
    assert check_options("spawn", "here", {"resources": Changing(), "name": np.str_("x")}) == {
        "resources": {"a": 1}, "name": "x",
    }  # fmt: skip


def test_an_actor_gets_the_values_that_were_checked() -> None:
    @zc.actor(resources=Changing(), concurrency_groups=Changing())
    class Asks:
        pass

    assert declared_options(Asks) == {"resources": {"a": 1}, "concurrency_groups": {"a": 1}}
    again: Any = zc.actor(Asks)
    assert again.options(resources=Changing()).options(env={})._options["resources"] == {"a": 1}


def test_each_option_of_an_actor_is_in_its_spec() -> None:
    names = {field.name for field in msgspec.structs.fields(ActorSpec)}
    assert names == {*accepted("declaration"), "log_level"}


def test_the_name_of_a_values_class_is_escaped() -> None:
    odd = type("A\nB\x1b[31m", (), {"__repr__": lambda _: "odd"})
    with pytest.raises(TypeError, match=r"got odd \(A\\nB\\x1b\[31m\)"):
        check_options("spawn", "here", {"name": odd()})
