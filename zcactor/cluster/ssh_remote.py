"""The far end of ``zcactor up`` and ``zcactor down``: a process that ssh has started on a host, and its lines.

`SCRIPT` is what the shell there reads. Its last command is Python, which greets with its versions, takes a request as a
line of JSON, and answers by lines that begin with `MARK`. All other lines, which a login prints, are passed over. A
started node stays when the near end says so; where the connection ends before that, it is ended again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from zcactor.cluster.child import fork_agent
from zcactor.cluster.daemon import DEFAULT_PORT, start_node, stop_nodes
from zcactor.cluster.rendezvous import outward
from zcactor.config import load_config
from zcactor.errors import ConnectionLost, ZcactorError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zcactor.cluster.records import NodeFile

__all__ = ["KEEP", "KEEP_ON", "MARK", "FarAnswer", "FarOrder", "listening_host", "script", "serve"]

MARK: Final = "@zcactor "
"""The beginning of each line of the far end."""
KEEP: Final = "keep\n"
"""The line by which the near end lets a started node stay."""
KEEP_ON: Final = "keep on\n"
"""The line by which it lets heads end, when all members have."""

_GREETING: Final = f"""
import json, sys
def say(**facts):
    print({MARK!r} + json.dumps(facts), flush=True)
try:
    import zcactor
except ImportError as error:
    say(failed="%s has no zcactor (%s): install it there, or name another interpreter by --python"
        % (sys.executable, error))
    sys.exit(1)
say(versions=[zcactor.__version__, "%d.%d" % sys.version_info[:2]])
line = sys.stdin.readline()
if line:
    from zcactor.cluster.ssh_remote import serve
    sys.exit(serve(line))
"""
"""The program of the far end until its version is known to be ours. Any Python 3 can read it."""


class FarOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request to the far end."""

    do: Literal["start", "stop"]
    token: str = ""
    """The cluster's token in its written form."""
    head: str | None = None
    """``host:port`` of the head to join; None starts one."""
    alone: bool = False
    """Whether there is no other host."""
    port: int = DEFAULT_PORT
    """The port of a head."""
    num_cpus: int | None = None
    resources: dict[str, float] = {}


class FarAnswer(msgspec.Struct, frozen=True):
    """A line of the far end."""

    versions: tuple[str, str] | None = None
    """Those of zcactor and of Python there."""
    failed: str | None = None
    """The reason why nothing was done."""
    ready: str | None = None
    """``host:port`` of the node that was started."""
    facts: str = ""
    """Its id, pid and log, for people."""
    ended: tuple[str, ...] | None = None
    """The nodes that were ended, a line for each."""


def script(python: str) -> str:
    """The commands for the shell of a host: start the interpreter `python` there with the greeting."""
    name = shlex.quote(python)
    absent = msgspec.json.encode(
        {"failed": f"there is no {python}: name the interpreter of that host by --python"}
    ).decode()  # fmt: skip
    return (
        f"command -v {name} >/dev/null 2>&1 || {{ printf '%s\\n' {shlex.quote(MARK + absent)}; exit 127; }}\n"
        f"exec {name} -c {shlex.quote(_GREETING)}\n"
    )


def listening_host(environ: Mapping[str, str], *, alone: bool) -> str:
    """The address at which a head listens: the one by which ssh has reached this host.

    Args:
        environ: the environment of a process that sshd has started.
        alone: whether no other host is to reach it.
    """
    # "client's address, its port, our address, our port", sshd(8)
    fields = environ.get("SSH_CONNECTION", "").split()
    host = fields[2] if len(fields) == 4 else outward()
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        return outward()
    return outward() if loopback and not alone else host


def serve(line: str) -> int:
    """Carry an order out, and answer it on standard output. Returns the exit status."""
    order = msgspec.json.decode(line, type=FarOrder)
    try:
        return _start(order) if order.do == "start" else _stop()
    except (ZcactorError, OSError, ValueError, TypeError) as error:
        text = error.args[0] if isinstance(error, ConnectionLost) else error
        _say(failed=str(text))
        return 1


def _start(order: FarOrder) -> int:
    os.environ["ZCACTOR_TOKEN"] = order.token  # the agent takes it out of its environment
    os.environ.pop("ZCACTOR_TOKEN_FILE", None)
    config, sources = load_config({"num_cpus": order.num_cpus})
    own_host = sources["host"] != "default"
    if order.head is None and not own_host:
        config = replace(config, host=listening_host(os.environ, alone=order.alone))
    node = start_node(
        replace(config, address=None), own_host=own_host, head=order.head,
        port=order.port if order.head is None else 0, resources=order.resources, stays=True, launch=fork_agent,
    )  # fmt: skip
    record = node.record
    _say(ready=record.address, facts=f"{record.name}, pid {record.pid}, log {record.log}")
    if sys.stdin.readline() == KEEP:
        return 0
    ours = {each.record.node for each in node.all}
    stop_nodes(config.shutdown_timeout, which=lambda each: each.node in ours)
    return 1


def _stop() -> int:
    """End members, and when the near end says that this is done on all hosts, the rest: members end with their head."""
    config, _ = load_config()
    _say(ended=_ended(config.shutdown_timeout, lambda record: record.role == "member"))
    if sys.stdin.readline() != KEEP_ON:
        return 1
    _say(ended=_ended(config.shutdown_timeout, lambda record: True))
    return 0


def _ended(grace: float, which: Callable[[NodeFile], bool]) -> list[str]:
    return [
        f"the {record.role} at {record.address} has ended" + ("" if by_itself else ", and had to be killed")
        for record, by_itself in stop_nodes(grace, which=which)
    ]


def _say(**facts: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # the near end has gone, and its nodes are ended all the same
        print(MARK + msgspec.json.encode(facts).decode(), flush=True)
