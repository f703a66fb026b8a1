"""The calls to Slurm without Slurm: a job that is a state and a log, and a log of the calls."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zcactor.cluster.rendezvous import Meeting


@dataclass
class FakeSlurm:
    """Slurm, as `zcactor.cluster.slurm_job` uses it. Tests set the first fields, and look at the log."""

    states: list[tuple[str, str]] = field(default_factory=lambda: [("PENDING", "Resources")])
    """The job's states; the last one stays until the job is cancelled."""
    address: str = ""
    """The head's address, which is there as soon as the job is submitted; empty for never."""
    refused: Exception | None = None
    log: list[str] = field(default_factory=list)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    asked: threading.Event = field(default_factory=threading.Event)
    """Set when the job's state is asked for."""

    def __call__(self, asked_by: str, folder: Path) -> FakeSlurmCalls:
        return FakeSlurmCalls(self, folder)


class FakeSlurmCalls:
    """The methods of `SlurmCalls`."""

    def __init__(self, fake: FakeSlurm, folder: Path) -> None:
        self._fake, self.folder = fake, folder
        self.job_id = ""

    def submit(self, parameters: Mapping[str, Any], folder: str, key: str, nodes: int, timeout: float) -> None:
        if self._fake.refused is not None:
            raise self._fake.refused
        self._fake.parameters = parameters
        self._fake.log.append(f"submit {nodes} {timeout:g}")
        self.job_id = "7"
        if self._fake.address:
            Meeting(Path(folder), key).publish(self._fake.address)

    def state(self) -> tuple[str, str]:
        self._fake.asked.set()
        found = self._fake.states[0]
        if len(self._fake.states) > 1:
            self._fake.states.pop(0)
        return found

    def cancel(self) -> None:
        self._fake.log.append("cancel")
        self._fake.states = [("COMPLETING", "None"), ("CANCELLED", "None")]

    def tail(self) -> str:
        return "the end of the log"
