"""The calls that `zcactor.cluster.submit` makes to Slurm and submitit. They block as long as Slurm's commands do."""

from __future__ import annotations

import os
import shutil
import warnings
from typing import TYPE_CHECKING, Any, Final

from zcactor.cluster.slurm import job_state
from zcactor.cluster.submitted import begin
from zcactor.errors import ConnectionLost, InsufficientResources

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["SlurmCalls"]

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
