"""The place of a process in its run: rank, size, and where the head is, from the variables of launchers. Pure.

`SOURCES` is the table. Each row is a launcher with its tell-tale, and the first row whose tell-tale is set decides.
Rows below are read as well, so that ``zcactor run --explain`` can show what they say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["OWN", "SOURCES", "Decision", "LauncherRow", "Reading", "Spot", "Way", "decide", "explain"]

OWN: Final = ("ZCACTOR_RANK", "ZCACTOR_SIZE", "ZCACTOR_HEAD", "ZCACTOR_RUN", "ZCACTOR_RENDEZVOUS")
"""The variables by which a process is told its place without a launcher. They are one process's own: neither the
program nor actors inherit them."""
Way = Literal["alone", "name", "nodes", "folder", "launcher"]
"""The way to the head: there is one rank only; by the name of its host; by Slurm's list of nodes, whose first is the
head's; by a file in a folder that all hosts share; or by the launcher's key-value space (PMI-1)."""


class Spot(msgspec.Struct, frozen=True):
    """The place of a process in its run."""

    rank: int
    size: int
    way: Way
    where: str = ""
    """The name of the head's host, Slurm's list of nodes, or the number of the descriptor to the launcher, by `way`."""
    port: int | None = None
    """The head's port, where it was given."""
    run: str = ""
    """The id of the run, which no other run has at the same time; empty where the launcher has to be asked."""
    one_host: bool = False
    """Whether the launcher says that all ranks are on one host."""

    @property
    def head(self) -> str:
        """The place of the head, for people."""
        port = "" if self.port is None else f":{self.port}"
        return {
            "alone": "here",
            "name": f"at {self.where}{port}",
            "nodes": f"on the first node of {self.where}",
            "folder": "found by a file in a shared folder",
            "launcher": f"found by the launcher (descriptor {self.where})",
        }[self.way]


class LauncherRow(NamedTuple):
    """A row of the table: a launcher."""

    name: str
    told_by: tuple[str, ...]
    """The variables that are all set where this launcher has started the process."""
    read: Callable[[Mapping[str, str]], Spot]
    """Read the place. Raises ValueError where a variable is missing or wrong."""


class Reading(NamedTuple):
    """A row whose tell-tale is set, and what it says."""

    source: LauncherRow
    spot: Spot | None
    problem: str = ""
    """The reason why it says nothing."""


class Decision(NamedTuple):
    """The place of a process, and all that was read."""

    spot: Spot
    source: str
    readings: tuple[Reading, ...]


def _number(environ: Mapping[str, str], name: str, least: int) -> int:
    text = environ.get(name, "")
    if not text:
        raise ValueError(f"{name} is not set")
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ValueError(f"{name} is {text!r}: it must be a number, at least {least}")
    return int(text)


def _ranks(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _number(environ, rank_name, 0), _number(environ, size_name, 1)
    if rank >= size:
        raise ValueError(f"{rank_name} is {rank} and {size_name} is {size}: ranks go from 0 to {size - 1}")
    return rank, size


def _host_and_port(text: str, name: str) -> tuple[str, int | None]:
    """The parts of ``host[:port]``; an IPv6 address is in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, ""
    bracketed = host.startswith("[") and host.endswith("]")
    number = int(port) if port.isascii() and port.isdecimal() else 0
    if not host.strip("[]") or (":" in host and not bracketed) or (colon and port and not 0 < number < 1 << 16):
        raise ValueError(f"{name} is {text!r}: it must be host or host:port, an IPv6 address in brackets")
    if colon and not port and not text.endswith("]"):
        raise ValueError(f"{name} is {text!r}: the port is missing behind the colon")
    return host.removeprefix("[").removesuffix("]"), number or None


def _own(environ: Mapping[str, str]) -> Spot:
    rank, size = _ranks(environ, "ZCACTOR_RANK", "ZCACTOR_SIZE")
    head, run = environ.get("ZCACTOR_HEAD", ""), environ.get("ZCACTOR_RUN", "")
    if head:
        host, port = _host_and_port(head, "ZCACTOR_HEAD")
        return Spot(rank, size, "name", host, port, run or head)
    if size == 1:
        return Spot(0, 1, "alone")
    if not run:
        raise ValueError(
            "ZCACTOR_RANK is set, and ranks cannot find each other: set ZCACTOR_HEAD to host or host:port of rank 0, "
            "or ZCACTOR_RUN to a name that only this run has, by which they meet in a folder that all hosts share"
        )
    return Spot(rank, size, "folder", run=run)


def _worker_set(environ: Mapping[str, str]) -> Spot:
    rank, size = _ranks(environ, "LWS_WORKER_INDEX", "LWS_GROUP_SIZE")
    leader = environ.get("LWS_LEADER_ADDRESS", "")
    if not leader:
        raise ValueError("LWS_LEADER_ADDRESS is not set")
    return Spot(rank, size, "name", leader, run=leader)


def _indexed_job(environ: Mapping[str, str]) -> Spot:
    rank, size = _ranks(environ, "JOB_COMPLETION_INDEX", "ZCACTOR_SIZE")
    head = environ.get("ZCACTOR_HEAD", "")
    if not head:
        raise ValueError("ZCACTOR_HEAD is not set: it is the name of the pod with index 0, <job>-0.<service>")
    host, port = _host_and_port(head, "ZCACTOR_HEAD")
    return Spot(rank, size, "name", host, port, environ.get("ZCACTOR_RUN") or head)


def _slurm(environ: Mapping[str, str]) -> Spot:
    rank, size = _ranks(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    nodes, job = environ.get("SLURM_STEP_NODELIST", ""), environ.get("SLURM_JOB_ID", "")
    for name, text in (("SLURM_STEP_NODELIST", nodes), ("SLURM_JOB_ID", job)):
        if not text:
            raise ValueError(f"{name} is not set")
    one = environ.get("SLURM_STEP_NUM_NODES") == "1"
    run = f"{job}.{environ['SLURM_STEP_ID']}"
    return Spot(0, 1, "alone") if size == 1 else Spot(rank, size, "nodes", nodes, run=run, one_host=one)


def _open_mpi(environ: Mapping[str, str]) -> Spot:
    rank, size = _ranks(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    one = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environ["OMPI_COMM_WORLD_SIZE"]
    return Spot(0, 1, "alone") if size == 1 else Spot(rank, size, "folder", run=_pmix_run(environ), one_host=one)


def _pmix(environ: Mapping[str, str]) -> Spot:
    rank, size = _ranks(environ, "PMIX_RANK", "PMIX_SIZE")
    return Spot(0, 1, "alone") if size == 1 else Spot(rank, size, "folder", run=_pmix_run(environ))


def _pmix_run(environ: Mapping[str, str]) -> str:
    # The namespace is made from the launcher's pid, so two hosts may have the same one. Open MPI 4 has a random key
    # beside it.
    named = [environ.get(name, "") for name in ("PMIX_NAMESPACE", "OMPI_MCA_orte_precondition_transports")]
    if not any(named):
        raise ValueError("PMIX_NAMESPACE is not set")
    return "/".join(filter(None, named))


def _mpich(environ: Mapping[str, str]) -> Spot:
    rank, size = _ranks(environ, "PMI_RANK", "PMI_SIZE")
    fd = _number(environ, "PMI_FD", 0)
    # The launcher is spoken to by a single rank as well: it takes an exit without a goodbye for an abort.
    return Spot(rank, size, "launcher", str(fd), one_host=environ.get("MPI_LOCALNRANKS") == environ["PMI_SIZE"])


SOURCES: Final = (
    LauncherRow("own variables", ("ZCACTOR_RANK",), _own),
    LauncherRow("LeaderWorkerSet", ("LWS_WORKER_INDEX",), _worker_set),
    LauncherRow("Indexed Job", ("JOB_COMPLETION_INDEX",), _indexed_job),
    LauncherRow("Open MPI", ("OMPI_COMM_WORLD_RANK",), _open_mpi),
    LauncherRow("MPICH", ("PMI_RANK", "PMI_FD", "MPI_LOCALNRANKS"), _mpich),
    LauncherRow("Slurm step", ("SLURM_PROCID", "SLURM_STEP_ID"), _slurm),
    LauncherRow("PMIx", ("PMIX_RANK",), _pmix),
    LauncherRow("PMI-1", ("PMI_RANK", "PMI_FD"), _mpich),
)
"""The launchers, in the order in which they are asked.

Within a job of Slurm's, mpirun and mpiexec start a daemon on each node as a step, and their ranks inherit the daemon's
variables: with two ranks on a node, both have its ``SLURM_PROCID``. So they come before Slurm, and by variables that
Slurm's own plugins for PMIx and PMI do not set.
"""
_NO_LAUNCHER: Final = "no launcher"


def decide(environ: Mapping[str, str]) -> Decision:
    """Find the place of a process with the environment `environ`. Without any launcher that is rank 0 of 1.

    Raises:
        ValueError: the first source that is there says something impossible; the message names it and the variable.
    """
    readings = _read_all(environ)
    if not readings:
        return Decision(Spot(0, 1, "alone"), _NO_LAUNCHER, ())
    first = readings[0]
    if first.spot is None:
        raise ValueError(f"{first.source.name}: {first.problem}")
    return Decision(first.spot, first.source.name, readings)


def explain(environ: Mapping[str, str]) -> list[str]:
    """The table of sources as lines of text: which are there, what each says, and which one decides."""
    readings = _read_all(environ)
    try:
        decision = decide(environ)
    except ValueError as error:
        decided = f"nothing: {error}"
    else:
        spot = decision.spot
        decided = f"{decision.source}: rank {spot.rank} of {spot.size}, the head is {spot.head}"
    by_name = {reading.source.name: reading for reading in readings}
    lines = []
    for source in SOURCES:
        variables = ", ".join(source.told_by)
        reading = by_name.get(source.name)
        if reading is None:
            text = f"{variables} not set"
        elif reading.spot is None:
            text = f"{variables} set, but {reading.problem}"
        else:
            text = f"rank {reading.spot.rank} of {reading.spot.size}, the head is {reading.spot.head}"
        lines.append(f"{source.name:16} {text}")
    places = {(reading.spot.rank, reading.spot.size) for reading in readings if reading.spot is not None}
    if len(places) > 1:
        lines.append("They disagree, and the first one that is there decides.")
    return [*lines, f"{'decided by':16} {decided}"]


def _read_all(environ: Mapping[str, str]) -> tuple[Reading, ...]:
    found = []
    for source in SOURCES:
        if all(environ.get(name) for name in source.told_by):
            try:
                found.append(Reading(source, source.read(environ)))
            except ValueError as error:
                found.append(Reading(source, None, str(error)))
    return tuple(found)
