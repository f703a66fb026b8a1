"""`zcactor.topology.files`: networks from TOML, and messages that name the file and the entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from zcactor.topology import Topology

GOOD = """
bandwidth = 1e9
latency = 2e-6

[hosts]
node1 = "leaf1"
node2 = "leaf1"
node3 = "leaf2"
node4 = ["leaf1", "leaf2"]

[switches]
leaf1 = { spine = 2 }
leaf2 = ["spine"]
"""


def test_hosts_switches_and_spines(tmp_path: Path) -> None:
    path = tmp_path / "network.toml"
    path.write_text(GOOD)
    topology = Topology.from_file(path)
    assert topology.hosts == ("node1", "node2", "node3", "node4")
    assert (topology.bandwidth, topology.latency, topology.diameter) == (1e9, 2e-6, 4)
    assert topology.graph.edges["leaf1", "spine"]["links"] == 2
    assert topology.graph.edges["leaf2", "spine"]["links"] == 1
    assert topology.predict(1000, plan="naive", hosts=["node1", "node2"]) == pytest.approx(1e-6 + 4e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts = {", r"network.toml is no TOML file"),
        ("speed = 1\n[hosts]\na = 's'", r"'speed' is unknown, the keys are bandwidth, latency, hosts, switches"),
        ("hosts = 3", r"hosts must be a table, not 3"),
        ("[switches]\na = 'b'", r"names no host"),
        ("[hosts]\na = 3", r"hosts.a must be a switch, a list .* not 3"),
        ("[hosts]\na = []", r"hosts.a must be a switch"),
        ("[hosts]\na = { s = 0 }", r"hosts.a must be a switch"),
        ("[hosts]\na = ['s', 's']", r"hosts.a names a switch twice"),
        ("[hosts]\na = 'b'\nb = 's'", r"hosts.a is linked to 'b', which is a host"),
        ("[hosts]\na = 's'\n[switches]\na = 't'", r"'a' is a host and a switch"),
        ("[hosts]\na = 's'\n[switches]\ns = 's'", r"switches.s: the links between 's' and 's' are named twice"),
        ("[hosts]\na = 's'\n[switches]\ns = 't'\nt = 's'", r"switches.t: the links between 't' and 's'"),
        ("[hosts]\na = 's'\nb = 't'", r"not connected: 2 parts"),
        ("bandwidth = 'fast'\n[hosts]\na = 's'", r"bandwidth must be"),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "network.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Topology.from_file(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Topology.from_file(tmp_path / "network.toml")
