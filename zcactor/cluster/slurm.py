"""Questions to Slurm by its command ``scontrol``: the hosts in a list of nodes, where a node is, and how a job is."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

from zcactor.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["address_in_slurm", "hosts_of", "job_state"]

_PATIENCE: Final = 30.0
"""Seconds that ``scontrol`` may take: three times the MessageTimeout that Slurm has by default."""


def hosts_of(nodes: str, environ: Mapping[str, str]) -> list[str]:
    """The names of the hosts in a list of Slurm's.

    Raises:
        ConnectionLost: Slurm's commands are missing or fail.
    """
    if "[" not in nodes:  # as the lists of one or two nodes often are
        return nodes.split(",")
    return _scontrol(environ, "show", "hostnames", nodes).split()


def address_in_slurm(node: str, environ: Mapping[str, str]) -> str:
    """The address (``NodeAddr``) by which Slurm reaches a node whose name does not resolve.

    Raises:
        ConnectionLost: Slurm's commands are missing or fail, or the node is unknown.
    """
    for field in _scontrol(environ, "show", "node", "-o", node).split():
        name, _, value = field.partition("=")
        if name == "NodeAddr" and value:
            return value
    raise ConnectionLost(f"Slurm does not say at which address {node} is: scontrol show node {node}")


def job_state(job: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """The state of a job in Slurm's word, such as ``PENDING`` or ``FAILED``, and the reason for it, or ``None``.

    ``scontrol`` knows it without accounting, for some minutes after the job's end.

    Raises:
        ConnectionLost: Slurm's commands are missing or fail, or the job is unknown.
    """
    found = dict.fromkeys(("JobState", "Reason"), "")
    for field in _scontrol(environ, "show", "job", "-o", job).split():
        name, _, value = field.partition("=")
        if name in found:
            found[name] = value
    return found["JobState"], found["Reason"]


def _scontrol(environ: Mapping[str, str], *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", *arguments], env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False, timeout=_PATIENCE,
        )  # fmt: skip
    except FileNotFoundError:
        raise ConnectionLost("scontrol is not here: install Slurm's commands (slurm-client) on every node") from None
    except subprocess.TimeoutExpired:
        raise ConnectionLost(f"scontrol did not answer for {_PATIENCE:g} s: slurmctld cannot be reached") from None
    if done.returncode:
        raise ConnectionLost(f"scontrol {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout
