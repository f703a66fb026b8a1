"""The options with which a node starts again; tests/cluster/test_drain.py has one that does."""

from __future__ import annotations

import msgspec

from zcactor.cluster.daemon import options_again
from zcactor.config import Config


def test_the_options_of_a_node_come_back() -> None:
    config = Config(host="127.0.0.2", num_cpus=3, address="127.0.0.1:1")
    made = options_again(config, b"t" * 32, "127.0.0.1:7433", 7434, {"tape": 1.0}, "ab" * 16)
    options = msgspec.msgpack.decode(made["data"])
    assert Config(**options.pop("config")) == Config(host="127.0.0.2", num_cpus=3)
    assert options == {
        "token": b"t" * 32, "head": "127.0.0.1:7433", "port": 7434, "resources": {"tape": 1.0}, "follows": "ab" * 16,
    }  # fmt: skip
    compile(made["code"], "again", "exec")
