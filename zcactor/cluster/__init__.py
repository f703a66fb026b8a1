"""Nodes that outlive the command that starts them, those that other engines run, and the files that list them.

Public are the functions by which a program starts a cluster on another engine, imported at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcactor.cluster.drain import Drained
    from zcactor.cluster.placed import EngineCluster
    from zcactor.cluster.ray import on_ray, sweep_ray
    from zcactor.cluster.slurm_job import submit

__all__ = ["Drained", "EngineCluster", "on_ray", "submit", "sweep_ray"]

_LATER = {
    "Drained": "zcactor.cluster.drain",
    "EngineCluster": "zcactor.cluster.placed",
    "on_ray": "zcactor.cluster.ray",
    "submit": "zcactor.cluster.slurm_job",
    "sweep_ray": "zcactor.cluster.ray",
}


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module 'zcactor.cluster' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
