"""Networks that a TOML file describes: hosts, the switches they are linked to, and the switches above these.

::

    bandwidth = 12.5e9                      # bytes/s of a link and direction; the default
    latency = 1e-6                          # seconds of a link; the default

    [hosts]
    node1 = "leaf1"
    node2 = ["leaf1", "leaf2"]              # a link to each

    [switches]
    leaf1 = { spine1 = 2, spine2 = 2 }      # two links to each
    leaf2 = ["spine1", "spine2"]

A switch that only others name is at the top.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from zcactor.topology.requirement import networkx

if TYPE_CHECKING:
    import os

__all__ = ["read"]

_KEYS: Final = ("bandwidth", "latency", "hosts", "switches")


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file. Returns the arguments of `zcactor.topology.topology.Topology`.

    Raises:
        ImportError: networkx is not installed.
        OSError: the file cannot be read.
        ValueError: the file is no TOML, or describes no network.
    """
    graph = networkx().Graph()
    try:
        told = tomllib.loads(Path(path).read_text("utf-8"))
    except ValueError as error:  # no TOML, or no UTF-8
        raise ValueError(f"{path} is no TOML file: {error}") from error
    unknown = [key for key in told if key not in _KEYS]
    if unknown:
        raise ValueError(f"{path}: {unknown[0]!r} is unknown, the keys are {', '.join(_KEYS)}")
    hosts, switches = (_table(path, told, name) for name in ("hosts", "switches"))
    if not hosts:
        raise ValueError(f'{path} names no host: write a table [hosts] with lines such as node1 = "switch1"')
    both = [name for name in hosts if name in switches]
    if both:
        raise ValueError(f"{path}: {both[0]!r} is a host and a switch, and a name must be one of them")
    for table, entries in (("hosts", hosts), ("switches", switches)):
        for name, entry in entries.items():
            where = f"{path}: {table}.{name}"
            graph.add_node(name)
            for switch, links in _upward(where, entry).items():
                if switch in hosts:
                    raise ValueError(f"{where} is linked to {switch!r}, which is a host: only switches link others")
                if switch == name or graph.has_edge(name, switch):
                    raise ValueError(f"{where}: the links between {name!r} and {switch!r} are named twice")
                graph.add_edge(name, switch, links=links)
    numbers: dict[str, Any] = {key: told[key] for key in ("bandwidth", "latency") if key in told}
    return {"graph": graph, "hosts": list(hosts), "label": f"network of {path}", **numbers}


def _table(path: str | os.PathLike[str], told: dict[str, Any], name: str) -> dict[str, Any]:
    table = told.get(name, {})
    if not isinstance(table, dict):
        raise ValueError(  # noqa: TRY004 - the type of an entry in a file is a value
            f"{path}: {name} must be a table, not {table!r}"
        )
    return table


def _upward(where: str, entry: Any) -> dict[str, int]:
    """The switches that an entry names, with the number of links to each."""
    if isinstance(entry, str):
        return {entry: 1}
    if isinstance(entry, list) and entry and all(isinstance(name, str) for name in entry):
        if len(set(entry)) < len(entry):
            raise ValueError(f"{where} names a switch twice; for several links write {{ {entry[0]} = 2 }}")
        return dict.fromkeys(entry, 1)
    if isinstance(entry, dict) and entry and all(type(links) is int and links >= 1 for links in entry.values()):
        return entry
    raise ValueError(
        f"{where} must be a switch, a list of different switches or a table of switches with their numbers of links, "
        f"not {entry!r}"
    )
