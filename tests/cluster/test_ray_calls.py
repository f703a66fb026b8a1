"""Ray's errors as ours, with a few functions in Ray's place; tests/engines/test_ray.py has the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import zcactor as zc
from zcactor.cluster.ray import RayCalls


class RayError(Exception):
    """Ray's base class of errors."""


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module called ray, which does nothing until a test says so."""
    module: Any = ModuleType("ray")
    util: Any = ModuleType("ray.util")
    module.util = util
    for name, each in {"ray": module, "ray.util": util}.items():
        monkeypatch.setitem(sys.modules, name, each)
    for name in ("placement_group", "scheduling_strategies"):
        monkeypatch.setitem(sys.modules, f"ray.util.{name}", ModuleType(f"ray.util.{name}"))
    module.exceptions = SimpleNamespace(RayError=RayError)
    module.is_initialized = lambda: False
    return module


def raising(error: Exception) -> Any:
    def function(*args: Any, **kwargs: Any) -> None:
        raise error

    return function


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"^zcactor.cluster.on_ray needs ray: pip install 'zcactor\[ray\]'$"):
        RayCalls("zcactor.cluster.on_ray")


def test_a_program_that_is_connected(ray: Any) -> None:
    ray.is_initialized = lambda: True
    assert not RayCalls("a test").connect("somewhere:1")


def test_a_connection(ray: Any) -> None:
    asked: list[dict[str, Any]] = []
    ray.init = lambda **arguments: asked.append(arguments)
    assert RayCalls("a test").connect(None)
    assert asked == [{"address": "auto", "configure_logging": False}]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:port"])
def test_an_address_where_nobody_is(ray: Any, address: str) -> None:
    with pytest.raises(zc.ConnectionLost, match=f"no Ray cluster answers at {address} .*ray start --head"):
        RayCalls("a test").connect(address)


def test_no_cluster(ray: Any) -> None:
    ray.init = raising(ConnectionError("Could not find any running Ray instance."))
    with pytest.raises(zc.ConnectionLost, match="there is no Ray cluster: start one by 'ray start --head'.*Could not"):
        RayCalls("a test").connect(None)


def test_another_version(ray: Any) -> None:
    ray.init = raising(RuntimeError("Version mismatch: The cluster was started with:\n    Python: 3.13.1"))
    with pytest.raises(zc.VersionMismatch, match=r"other versions than this program: .*\n.*3\.13\.1"):
        RayCalls("a test").connect(None)


def test_another_error(ray: Any) -> None:
    ray.init = raising(RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="^something else$"):
        RayCalls("a test").connect(None)


def test_a_name(ray: Any) -> None:
    living: set[str] = set()

    class Remote:
        def __init__(self, name: str) -> None:
            self._name = name

        def remote(self) -> str:
            if self._name in living:
                raise ValueError("it is taken")
            living.add(self._name)
            return self._name

    def get_actor(name: str, namespace: str) -> str:
        assert namespace == "zcactor"
        if name not in living:
            raise ValueError("there is none")
        return name

    ray.remote = lambda kind: SimpleNamespace(options=lambda name, namespace, num_cpus: Remote(name))
    ray.get_actor = get_actor
    calls = RayCalls("a test")
    assert not calls.claimed("zcactor:x")
    assert calls.claim("zcactor:x") == "zcactor:x"
    assert calls.claimed("zcactor:x")
    with pytest.raises(zc.NameTaken, match="a living program has 'zcactor:x'"):
        calls.claim("zcactor:x")


def test_an_actor_that_cannot_start(ray: Any) -> None:
    ray.get = raising(RayError("ModuleNotFoundError: No module named 'zcactor'"))
    calls = RayCalls("a test")
    with pytest.raises(zc.ConnectionLost, match="bundle 3: zcactor is not installed where Ray has placed it"):
        calls.answer("reference", 3)
    ray.get = raising(RayError("The actor died"))
    with pytest.raises(zc.ConnectionLost, match="bundle 3: The actor died"):
        calls.answer("reference", 3)


def test_room_without_internal_names(ray: Any) -> None:
    ray.cluster_resources = lambda: {
        "memory": 1e9, "CPU": 8.0, "node:10.0.0.1": 1.0, "CPU_group_0_ab": 4.0, "object_store_memory": 1e8, "fast": 0.5,
    }  # fmt: skip
    ray.available_resources = dict
    assert RayCalls("a test").room() == "it has 8 CPU, 0.5 fast, and free nothing"


def test_groups_that_exist(ray: Any) -> None:
    ray.util.placement_group_table = lambda: {
        "01": {"name": "zcactor:a", "state": "REMOVED"}, "02": {"name": "zcactor:b", "state": "PENDING"},
    }  # fmt: skip
    assert RayCalls("a test").groups() == {"02": "zcactor:b"}
