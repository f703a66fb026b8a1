"""`zcactor.cli.topology`: the table and the JSON that ``zcactor topology simulate`` prints, and its refusals."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner, Result

from zcactor.cli.main import app
from zcactor.cli.topology import KINDS, shaped
from zcactor.topology import torus


def run(*options: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, ["topology", "simulate", *options])


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_sixty_four_hosts(kind: str) -> None:
    done = run("--hosts", "64", "--kind", kind, "--allreduce", "256MiB")
    assert done.exit_code == 0, done.output
    first, _, *plans = done.output.splitlines()
    assert ": 64 hosts, diameter " in first
    assert [line.split()[0] for line in plans] == ["ring", "halving", "direct", "naive"]


def test_orders_as_json() -> None:
    told = {}
    for order in ("given", "best", "random"):
        done = run("--kind", "torus", "--order", order, "--json")
        told[order] = json.loads(done.output)
    assert told["given"]["network"] == "torus of 8 x 8"
    assert told["given"]["predicted_s"]["ring"] == pytest.approx(torus(8, 8).predict(256 << 20))
    assert told["given"]["volume"]["ring"] == 2 * 63 * (256 << 20) // 64
    ring = {order: each["predicted_s"]["ring"] for order, each in told.items()}
    assert ring["best"] < ring["given"] < ring["random"]


@pytest.mark.parametrize(
    ("kind", "hosts"), [("fat_tree", 16), ("fat_tree", 128), ("fat_tree", 1024), ("dragonfly", 72)]
)
def test_usual_shapes(kind: str, hosts: int) -> None:
    topology = shaped(kind, hosts, 1e9, 1e-6)
    assert (len(topology.hosts), topology.diameter) == (hosts, 6 if kind == "fat_tree" else 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--allreduce", "lots"), "zcactor: 'lots' is no size"),
        (("--kind", "fat_tree", "--hosts", "7"), "zcactor: no fat_tree has 7 hosts; possible are 6 and 8"),
        (("--kind", "hamming_mesh", "--hosts", "3"), "no hamming_mesh has 3 hosts; possible are 4"),
        (("--kind", "torus", "--bandwidth", "0"), "bandwidth must be a finite number > 0"),
        (("--kind", "star"), "'star' is not one of"),
        (("--hosts", "1"), "2<=x<=4096"),
    ],
)
def test_wrong_options(options: tuple[str, ...], message: str) -> None:
    done = run(*options)
    assert done.exit_code == 2
    assert message in done.output


def test_without_networkx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    done = run("--kind", "ring")
    assert done.exit_code == 2
    assert "pip install 'zcactor[topology]'" in done.output
