"""The choice of a binding, and the reasons when none can be used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zcactor.transport.verbs.driver.bindings import Absent, bindings

Importer = Callable[[str], ModuleType]


def missing(name: str) -> ModuleType:
    """An importer where nothing is installed."""
    raise ModuleNotFoundError(f"No module named {name.partition('.')[0]!r}", name=name.partition(".")[0])


def failing(error: Exception) -> Importer:
    """An importer where everything is installed and fails."""

    def importer(_name: str) -> ModuleType:
        raise error

    return importer


def ibverbs(get_device_list: Callable[[], list[Any]]) -> Importer:
    """An importer where only ibverbs is installed."""

    def importer(name: str) -> ModuleType:
        if name != "ibverbs":
            return missing(name)
        module = ModuleType("ibverbs")
        module.__dict__["get_device_list"] = get_device_list
        return module

    return importer


def absent(answer: object) -> Absent:
    """Check that there is no binding, and that each reason names a cause and a fix."""
    assert isinstance(answer, Absent)
    assert all(reason.cause and reason.fix for reason in answer.reasons)
    assert str(answer).startswith("no RDMA: ")
    return answer


def test_nothing_is_installed() -> None:
    reasons = absent(bindings(importer=missing)).reasons
    assert [(reason.binding, reason.cause) for reason in reasons] == [
        ("pyverbs", "the package is not installed"),
        ("ibverbs", "the package is not installed"),
    ]
    assert "apt install python3-pyverbs" in reasons[0].fix
    assert reasons[1].fix == "pip install 'zcactor[rdma]'"


@pytest.mark.parametrize("which", ["pyverbs", "ibverbs"])
def test_only_one_is_wanted(which: str) -> None:
    assert [reason.binding for reason in absent(bindings(which, importer=missing)).reasons] == [which]


def test_none_is_wanted() -> None:
    assert "the setting verbs is off" in str(absent(bindings("none", importer=failing(AssertionError()))))


def test_unknown_name() -> None:
    assert "name one of pyverbs, ibverbs" in str(absent(bindings("libfabric", importer=missing)))


@pytest.mark.parametrize(
    ("error", "cause", "fix"),
    [
        (
            ImportError("could not load libibverbs.so.1 - install rdma-core"),
            "libibverbs cannot be loaded",
            "libibverbs1",
        ),
        (ImportError("version `IBVERBS_PRIVATE_59' not found"), "another rdma-core", "python3-pyverbs"),
        (ModuleNotFoundError("No module named 'x'", name="x"), "cannot be imported", "reinstall"),
        (AttributeError("IBV_QPT_RC"), "cannot be imported", "reinstall"),
    ],
)
def test_broken_library(error: Exception, cause: str, fix: str) -> None:
    for reason in absent(bindings(importer=failing(error))).reasons:
        assert cause in reason.cause
        assert fix in reason.fix


def test_kernel_without_rdma(tmp_path: Path) -> None:
    def fail() -> list[Any]:
        raise OSError(38, "ibv_get_device_list failed: Function not implemented")

    (reason,) = absent(bindings("ibverbs", importer=ibverbs(fail), root=tmp_path / "missing")).reasons
    assert "this kernel has no RDMA" in reason.cause
    assert "Function not implemented" in reason.cause
    assert "modprobe" in reason.fix


def test_no_device(tmp_path: Path) -> None:
    (reason,) = absent(bindings("ibverbs", importer=ibverbs(list), root=tmp_path)).reasons
    assert "no device" in reason.cause
    assert "rdma link add" in reason.fix


def test_device_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    (reason,) = absent(bindings("ibverbs", importer=ibverbs(list), root=tmp_path)).reasons
    assert "libibverbs cannot use" in reason.cause
    assert "/dev/infiniband" in reason.fix


def test_nothing_is_imported_where_the_kernel_lists_no_device(tmp_path: Path) -> None:
    def never(name: str) -> ModuleType:
        pytest.fail(f"{name} was imported")

    for root in (tmp_path, tmp_path / "none"):
        (reason,) = absent(bindings(quick=True, importer=never, root=root)).reasons
        assert f"it lists no RDMA device in {root}" in reason.cause
    (tmp_path / "mlx5_0").touch()
    assert len(absent(bindings(quick=True, importer=missing, root=tmp_path)).reasons) == 2


def test_next_binding_is_tried() -> None:
    binding = bindings(importer=ibverbs(lambda: [SimpleNamespace(name="mlx5_0")]))
    assert not isinstance(binding, Absent)
    assert binding.name == "ibverbs"
    assert binding.devices() == ["mlx5_0"]


def test_on_this_machine() -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    for which in (None, "pyverbs", "ibverbs"):
        answer = bindings(which)
        if isinstance(answer, Absent):
            absent(answer)
        else:
            assert answer.devices()
    assert (root.handlers[:], root.level) == before
