"""The command ``zcactor topology simulate``: the predicted time of an allreduce in a network of some shape."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any, Final

import click

from zcactor.cli.nodes import fail
from zcactor.sizes import size

if TYPE_CHECKING:
    from zcactor.topology import Topology

__all__ = ["KINDS", "shaped", "topology"]

KINDS: Final = (
    "chain", "ring", "mesh", "torus", "tree", "fat_tree", "dragonfly", "dragonfly_plus", "hamming_mesh",
)  # fmt: skip
"""The kinds of networks, by the names of their functions."""


def _factors(count: int) -> tuple[int, int]:
    """The two factors of a number that are closest to each other, the smaller one first."""
    small = next(each for each in range(math.isqrt(count), 0, -1) if count % each == 0)
    return small, count // small


def _sizes(kind: str, hosts: int) -> dict[str, Any] | None:
    """The arguments by which a network of `kind` has that many hosts; None where there is none."""
    small = range(1, math.isqrt(hosts) + 1)
    found: list[dict[str, Any]] = []
    if kind == "tree":
        found = [{"radix": n + 1, "levels": k} for n in range(2, hosts + 1) for k in range(1, 21) if n**k == hosts]
    elif kind == "fat_tree":  # of three levels, the usual one, or as few as there can be, but for a single switch
        levels = sorted(range(1, 21), key=lambda k: (k != 3, k == 1, k))
        found = [{"radix": 2 * n, "levels": k} for k in levels for n in range(1, hosts + 1) if 2 * n**k == hosts]
    elif kind == "dragonfly":  # balanced: twice as many routers in a group as hosts at a router
        pairs = [(n, hosts // (2 * n * n)) for n in small if hosts % (2 * n * n) == 0]
        found = [{"groups": g, "routers": 2 * n, "hosts": n} for n, g in pairs if g <= 2 * n * n + 1]
    elif kind == "dragonfly_plus":
        pairs = [(n, hosts // (n * n)) for n in small if hosts % (n * n) == 0]
        found = [{"groups": g, "leaves": n, "spines": n, "hosts": n} for n, g in pairs if g <= n + 1]
    elif hosts % 4 == 0:
        found = [{"boards": _factors(hosts // 4), "board": (2, 2)}]
    return found[0] if found else None


def shaped(kind: str, hosts: int, bandwidth: float, latency: float) -> Topology:
    """The network of a kind with a number of hosts, as square as possible.

    Raises:
        ImportError: networkx is not installed.
        ValueError: no such network has that many hosts. The message names the next numbers that are possible.
    """
    from zcactor.topology import shapes

    build = getattr(shapes, kind)
    if kind in ("chain", "ring"):
        made: Topology = build(hosts, bandwidth=bandwidth, latency=latency)
        return made
    if kind in ("mesh", "torus"):
        made = build(*_factors(hosts), bandwidth=bandwidth, latency=latency)
        return made
    sizes = _sizes(kind, hosts)
    if sizes is None:
        near = [each for each in (*range(hosts, 0, -1), *range(hosts, 4 * hosts)) if _sizes(kind, each)]
        close = sorted({*[each for each in near if each < hosts][:1], *[each for each in near if each > hosts][:1]})
        raise ValueError(f"no {kind} has {hosts} hosts; possible are {' and '.join(map(str, close)) or 'none near'}")
    made = build(**sizes, bandwidth=bandwidth, latency=latency)
    return made


@click.group()
def topology() -> None:
    """Networks of hosts, and the cost of an allreduce in them."""


@topology.command()
@click.option(
    "--hosts", type=click.IntRange(2, 4096), default=64, show_default=True, help="Number of hosts, one a rank."
)
@click.option("--kind", type=click.Choice(KINDS), default="fat_tree", show_default=True, help="Shape of the network.")
@click.option("--allreduce", "text", default="256MiB", show_default=True, metavar="SIZE", help="Bytes on each rank.")
@click.option("--order", type=click.Choice(["given", "best", "random"]), default="given", show_default=True,
              help="Order of ranks.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random order.")
@click.option("--bandwidth", type=float, default=12.5e9, show_default=True, help="Bytes/s of a link.")
@click.option("--latency", type=float, default=1e-6, show_default=True, help="Seconds of a link.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as one JSON object.")
def simulate(
    hosts: int, kind: str, text: str, order: str, seed: int, bandwidth: float, latency: float, as_json: bool
) -> None:
    """Predict an allreduce in a network of some shape, for each plan.

    The exit status is 2 for a wrong option, and where networkx is not installed.
    """
    from zcactor.topology import plans  # starting a node is not to wait for it

    try:
        nbytes, network = size(text), shaped(kind, hosts, bandwidth, latency)
    except (ValueError, ImportError) as error:
        raise fail(error, 2) from error
    ranks = list(network.hosts)
    if order != "given":
        random.Random(seed).shuffle(ranks)
    if order == "best":
        ranks = network.order(ranks)
    times = {plan: network.predict(nbytes, plan=plan, hosts=ranks) for plan in plans.PLANS}
    told = {
        "network": network.label, "hosts": hosts, "diameter": network.diameter, "bisection": network.bisection,
        "bisection_exact": network.bisection_exact, "nbytes": nbytes, "order": order, "predicted_s": times,
        "volume": {plan: round(plans.volume(plan, hosts) * nbytes) for plan in plans.PLANS},
    }  # fmt: skip
    if as_json:
        click.echo(json.dumps(told, indent=2))
        return
    exact = "" if network.bisection_exact else " at most"
    click.echo(
        f"{network.label}: {hosts} hosts, diameter {network.diameter}, bisection {network.bisection} links{exact}"
    )
    click.echo(f"allreduce of {nbytes:,} bytes, ranks in the order {order!r}, by prediction:")
    for plan, seconds in times.items():
        click.echo(f"  {plan:<8} {seconds * 1e3:12,.3f} ms  {plans.volume(plan, hosts) * nbytes:18,.0f} bytes a rank")
