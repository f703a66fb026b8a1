"""Networks of hosts as graphs: their measures, good orders of ranks, and the time of an allreduce in them.

::

    topology    `Topology`: the graph, its hosts, and the answers about it
    shapes      chain, ring, mesh, torus, tree, fat tree, dragonfly, dragonfly+, Hamming mesh
    files       a network that a file describes
    measuring   a network that is measured between nodes
    ranks       the order of a group's ranks
    arcs        the links of a network as arrays, and the load of flows on them
    plans       the flows of each plan of an allreduce
    flows       the rates of flows that share links, and the time of steps of them
    cuts        the bisection of a network
    orders      orders of hosts for a ring

The graphs are those of networkx, which the extra ``topology`` installs: without it each of these raises an ImportError
that says so. Importing this room does not import networkx.
"""

from zcactor.topology.shapes import chain, dragonfly, dragonfly_plus, fat_tree, hamming_mesh, mesh, ring, torus, tree
from zcactor.topology.topology import Topology

__all__ = [
    "Topology",
    "chain",
    "dragonfly",
    "dragonfly_plus",
    "fat_tree",
    "hamming_mesh",
    "mesh",
    "ring",
    "torus",
    "tree",
]
