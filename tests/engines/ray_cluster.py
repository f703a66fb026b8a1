"""A Ray cluster of two nodes on this host: prints its address, and does what the lines of its input say.

``add`` adds a node with 1 CPU and the resource ``extra``, ``remove`` removes it as if it were lost, and the end of the
input ends all.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

_STORE = 80 << 20
"""Bytes of each node's object store, a little more than the least that Ray takes."""


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "include_dashboard": False, "object_store_memory": _STORE},
    )
    cluster.add_node(num_cpus=4, object_store_memory=_STORE)
    print("ready", cluster.address, flush=True)
    added = []
    for line in sys.stdin:
        if line == "add\n":
            added.append(cluster.add_node(num_cpus=1, resources={"extra": 1}, object_store_memory=_STORE))
        elif line == "remove\n":
            cluster.remove_node(added.pop(), allow_graceful=False)
    cluster.shutdown()


if __name__ == "__main__":
    main()
