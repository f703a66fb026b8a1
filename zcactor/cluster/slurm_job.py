"""A cluster in a job of Slurm's, from a program on a login node or in a notebook: `submit`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import time as clock
import warnings
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from zcactor.cluster.placed import EngineCluster, aside, given, token_of_user
from zcactor.cluster.rendezvous import Meeting
from zcactor.cluster.slurm import job_state
from zcactor.cluster.submitted import begin
from zcactor.config import load_config
from zcactor.driver.driver import check_free
from zcactor.errors import ConnectionLost, InsufficientResources

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager

__all__ = ["SlurmCalls", "submit"]

_NEEDED: Final = ("sbatch", "srun", "scontrol", "scancel")
_NO_ROOM: Final = ("node configuration is not available", "Node count specification invalid")
"""Slurm's words for a job that it could never run."""
_TAIL: Final = 1000
"""Bytes of a log that are shown."""


class SlurmCalls:
    """Slurm, as far as it is needed here.

    Args:
        asked_by: the function that needs it, for messages.
        folder: for the job's logs, and shared by all hosts.

    Raises:
        ImportError: submitit is not installed.
        ConnectionLost: Slurm's commands are missing.
    """

    def __init__(self, asked_by: str, folder: Path) -> None:
        try:
            import submitit
        except ImportError as error:
            raise ImportError(f"{asked_by} needs submitit: pip install 'zcactor[slurm]'", name="submitit") from error
        missing = [name for name in _NEEDED if shutil.which(name) is None]
        if missing:
            raise ConnectionLost(
                f"{asked_by} needs {', '.join(missing)}: install Slurm's commands (slurm-client), or call it on a "
                "login node"
            )
        self._submitit = submitit
        self._folder = folder
        self._job: Any = None
        self.job_id = ""
        """The id of the job that was submitted."""

    def submit(self, parameters: Mapping[str, Any], *arguments: Any) -> None:
        """Submit the job.

        Args:
            parameters: as submitit's ``SlurmExecutor.update_parameters`` takes them.
            arguments: see `begin`.

        Raises:
            InsufficientResources: the site does not have so many nodes, or none of that kind.
            ConnectionLost: Slurm has refused it for another reason; the message is Slurm's.
            ValueError: submitit does not know a parameter.
            OSError: a file in the folder cannot be made.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            executor = self._submitit.SlurmExecutor(folder=self._folder)
            executor.update_parameters(**parameters)
            try:
                self._job = executor.submit(begin, *arguments)
            except (self._submitit.core.utils.FailedJobError, RuntimeError) as error:
                text = f"Slurm has refused the job: {' '.join(str(error).split())}"
                kind = InsufficientResources if any(word in text for word in _NO_ROOM) else ConnectionLost
                raise kind(text) from error
        self.job_id = str(self._job.job_id)

    def state(self) -> tuple[str, str]:
        """The job's state in Slurm's word, such as ``PENDING``, and the reason; see `job_state`."""
        return job_state(self.job_id, os.environ)

    def cancel(self) -> None:
        """Cancel the job; without effect where it has ended."""
        self._job.cancel(check=False)

    def tail(self) -> str:
        """The end of the job's log: of the errors of its first task, of those of another, or of its output."""
        job = self.job_id
        for pattern in (f"{job}_0_log.err", f"{job}_*_log.err", f"{job}_0_log.out"):
            for path in sorted(self._folder.glob(pattern)):
                text = path.read_bytes()[-_TAIL:].decode("utf-8", "replace").strip()
                if text:
                    return f"the end of {path}:\n{text}"
        return f"no log in {self._folder}"


_NO_PARAMETERS: Final[Mapping[str, Any]] = MappingProxyType({})
_WAITING: Final = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
"""The states in which a job has not begun."""
_LIVING: Final = _WAITING | {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
"""The states of a job that has not ended."""
_NEVER: Final = frozenset({"PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints"})
"""The reasons for which a waiting job never begins, unless it or the partition is changed."""
_PAUSE: Final = 0.1
"""Seconds between two looks for the head's address."""
_QUESTION: Final = 2.0
"""Seconds between two questions for a job's state: each of them is a message to the one controller of a site."""
_KILL_WAIT: Final = 40.0
"""Seconds beyond the actors' own time after which a cancelled job is not waited for: Slurm kills it after its KillWait,
which is 30 s by default."""


class _Job(msgspec.Struct, frozen=True):
    """The arguments of `submit`, checked."""

    nodes: int
    parameters: dict[str, Any]
    folder: Path
    timeout: float
    join: bool


def submit(
    nodes: int,
    time: str,
    partition: str | None = None,
    cpus_per_task: int | None = None,
    gpus_per_node: int | None = None,
    folder: str = "slurm",
    timeout: float = 600.0,
    join: bool = True,
    slurm: Mapping[str, Any] = _NO_PARAMETERS,
) -> AbstractAsyncContextManager[EngineCluster]:
    """Start a cluster in a job of Slurm's: ``async with zcactor.cluster.submit(4, "02:00:00") as cluster:``.

    The job has one task on each node, and each is a node of the cluster, as by ``srun zcactor run``. Leaving the
    context cancels the job; so actors are closed in order, and nodes end. Cancelling inside it, or while it waits for
    the job, does the same. A job whose program was killed runs on until its time is over, or until ``scancel``.

    Args:
        nodes: number of nodes.
        time: the job's limit, as sbatch takes it: ``"hours:minutes:seconds"``.
        partition: Slurm's partition; default the site's.
        cpus_per_task: CPUs of each node; default Slurm's, which is often 1.
        gpus_per_node: GPUs of each node.
        folder: for the job's logs and the head's address, which only this user can read there. All hosts share it.
        timeout: seconds until the job has begun and every node has joined.
        join: whether this program joins by `zc.init`, with settings as `zc.init` takes them, and leaves at the end.
        slurm: further parameters of submitit's ``SlurmExecutor``, such as ``{"account": "physics", "mem": "64GB"}``.

    Returns:
        An asynchronous context manager, which gives an `EngineCluster` with the job's id.

    Raises:
        ValueError: an argument is wrong; at the call.

    Raises when entered:
        ImportError: submitit is not installed.
        InsufficientResources: the job has not begun within `timeout`, or never could.
        ConnectionLost: Slurm's commands are missing, Slurm has refused the job, or the job has ended or its nodes have
            not joined in time. The message has the job's state and the end of its log.
        ValueError: submitit does not know a parameter in `slurm`.
        AlreadyInitialized: with `join`: the runtime is running in this process.
        AuthenticationError: the token's file is not safe, or the file with the address is another user's.
        OSError: a file in `folder` cannot be made.
    """
    given: Any = nodes
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"submit: nodes is {nodes!r}: it must be a number, at least 1")
    if not timeout > 0:
        raise ValueError(f"submit: timeout is {timeout!r}: it must be seconds, more than 0")
    parameters: dict[str, Any] = {
        "job_name": "zcactor", "partition": partition, "cpus_per_task": cpus_per_task, "gpus_per_node": gpus_per_node,
        **slurm, "nodes": nodes, "ntasks_per_node": 1,
        # A node that is lost is one node less, and not the end of the job; see `zcactor.cluster.run`.
        "srun_args": ["--no-kill", *slurm.get("srun_args", ())],
        # `time` is a number of minutes to submitit, which has no use for it here.
        "additional_parameters": {"no_kill": True, "time": time, **slurm.get("additional_parameters", {})},
    }  # fmt: skip
    parameters = {name: value for name, value in parameters.items() if value is not None}
    return _submit(_Job(nodes, parameters, Path(folder).absolute(), timeout, join))


@contextlib.asynccontextmanager
async def _submit(wanted: _Job) -> AsyncIterator[EngineCluster]:
    deadline = clock.monotonic() + wanted.timeout
    if wanted.join:
        check_free()
    token = token_of_user()
    config, _ = load_config()
    slurm = await aside(SlurmCalls, "zcactor.cluster.submit", wanted.folder)
    async with contextlib.AsyncExitStack() as undo:
        running = _Running(slurm, wanted)
        undo.push_async_callback(running.end, config.shutdown_timeout)
        cluster = EngineCluster(await running.begin(deadline), wanted.nodes, slurm.job_id)
        yield await undo.enter_async_context(given(cluster, token, join=wanted.join))


class _Running:
    """The job of a cluster.

    Args:
        slurm: the calls to Slurm.
        wanted: the arguments of `submit`.
    """

    def __init__(self, slurm: SlurmCalls, wanted: _Job) -> None:
        self._slurm, self._wanted = slurm, wanted
        self._key = secrets.token_hex(16)
        self._meeting = Meeting(wanted.folder, self._key)
        self._address = ""

    async def begin(self, deadline: float) -> str:
        """Submit the job, and wait for the head's address, which it has when all nodes have joined.

        Args:
            deadline: the time of giving up, in seconds of ``time.monotonic()``.
        """
        wanted = self._wanted
        await aside(self._slurm.submit, wanted.parameters, str(wanted.folder), self._key, wanted.nodes, wanted.timeout)
        question = clock.monotonic()
        while (address := await aside(self._meeting.look)) is None:
            now = clock.monotonic()
            if now >= min(question, deadline):
                await self._check(over=now >= deadline)
                question = now + _QUESTION
            await asyncio.sleep(_PAUSE)
        self._address = address
        return address

    async def _check(self, *, over: bool) -> None:
        """Raise an error where the job has ended, or, with `over`, where it has not begun or its nodes are missing."""
        state, reason = await aside(self._slurm.state)
        because = f"{state} ({reason})" if reason not in ("", "None") else state
        told = f"Slurm's job {self._slurm.job_id} "
        if state not in _LIVING:
            raise ConnectionLost(f"{told}ended as {because}; {await aside(self._slurm.tail)}")
        if state in _WAITING and reason in _NEVER:
            raise InsufficientResources(
                f"{told}never begins: it is {because}; it is cancelled now. Ask for less, or name another partition="
            )
        if over and state in _WAITING:
            raise InsufficientResources(
                f"{told}has not begun within {self._wanted.timeout:g} s: it is {because}; it is cancelled now. Ask for "
                "less, or wait longer (timeout=)"
            )
        if over:
            raise ConnectionLost(
                f"{told}is {because}, and its nodes have not joined within {self._wanted.timeout:g} s; "
                f"{await aside(self._slurm.tail)}"
            )

    async def end(self, grace: float) -> None:
        """Cancel the job, and wait until its nodes have ended. Cancelling stops the wait.

        Args:
            grace: seconds in which actors are closed.
        """
        if not self._slurm.job_id:
            return
        await aside(self._slurm.cancel)
        deadline = clock.monotonic() + grace + _KILL_WAIT
        while True:
            state, _ = await aside(self._slurm.state)
            if state not in _LIVING or clock.monotonic() >= deadline:
                break
            await asyncio.sleep(_PAUSE)
        if self._address:
            self._meeting.remove(self._address)  # where the job had no time for it
