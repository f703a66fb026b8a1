"""Clusters of a made-up user that are measured: the commands that bring them up, and programs that measure inside."""

from __future__ import annotations

import base64
import http.client
import json
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.harness import Measurement, spread
from tests.engines.launching import User, unused_ports

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO

    from benchmarks.harness import Budget
    from tests.engines.etcds import Etcd

__all__ = [
    "ITEM", "PATIENCE", "ZCACTOR", "BareEtcd", "Serving", "head_of", "measured", "place", "seconds_of",
    "start", "start_head", "zcactor",
]  # fmt: skip

ITEM: Final = "engines"
ZCACTOR: Final = (sys.executable, "-m", "zcactor")
PATIENCE: Final = 120.0
"""Seconds after which a benchmark gives up."""


def measured(
    name: str, values: Sequence[float], unit: str, budget: Budget, floors: Sequence[float] = (), floor_name: str = ""
) -> Measurement:
    """The measurement of the median of some values, next to the median of their floors."""
    floor = median(floors) if floors else None
    return Measurement(ITEM, name, median(values), unit, floor, floor_name, budget, len(values), spread=spread(values))


class Serving:
    """The program `benchmarks.measuring` under way, in a run, beside nodes, or on Ray.

    Args:
        user: the user, whose folder it is in.
        command: the words before the interpreter and the program.
        environ: further variables.
    """

    def __init__(self, user: User, *command: str, **environ: str) -> None:
        with open(user.folder / "measuring.out", "w") as errors:
            self._process = subprocess.Popen(
                [*command, sys.executable, "-m", "benchmarks.measuring"], env={**user.variables, **environ},
                cwd=user.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True,
            )  # fmt: skip
        self._errors = user.folder / "measuring.out"
        if self.answer() != "ready":
            raise RuntimeError(f"{' '.join(command)} did not begin to measure")

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")[-500:]

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the program; its result."""
        self.tell(name, *arguments)
        return self.answer()

    def tell(self, name: str, *arguments: Any) -> None:
        """Begin to call a method of the program, whose result `answer` returns."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the result of the method."""
        output: IO[str] | None = self._process.stdout
        assert output is not None
        while not (line := output.readline()).startswith("@"):  # Ray prints as well
            if not line:
                raise RuntimeError(f"the program has ended: {self._said()}")
        return json.loads(line[1:])

    def end(self) -> None:
        """Let the program end in order."""
        self._process.communicate(timeout=PATIENCE)
        if self._process.returncode:
            raise RuntimeError(f"the program has ended with {self._process.returncode}: {self._said()}")


def start(user: User, *arguments: str, **environ: str) -> float:
    """Run ``zcactor start``, which returns when all that it starts is ready; the seconds."""
    return seconds_of(user, *ZCACTOR, "start", *arguments, **environ)


def start_head(user: User, *arguments: str, **environ: str) -> str:
    """Start a head at an unused port, or a standby; its address."""
    port = unused_ports(1)[0]
    start(user, "--head", "--port", str(port), *arguments, **environ)
    return f"127.0.0.1:{port}"


def zcactor(user: User, *arguments: str, **environ: str) -> str:
    """Run a command of zcactor's; return its output."""
    done = subprocess.run(
        [*ZCACTOR, *arguments], env={**user.variables, **environ}, cwd=user.folder, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"zcactor {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def head_of(user: User, *arguments: str) -> dict[str, Any]:
    """The head's line of ``zcactor status``."""
    found: dict[str, Any] = json.loads(zcactor(user, "status", "--json", *arguments))["head"]
    return found


def seconds_of(user: User, *command: str, **environ: str) -> float:
    """Run a command to its end; the seconds."""
    before = time.perf_counter()
    done = subprocess.run(
        command, env={**user.variables, **environ}, cwd=user.folder, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - before
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
    return seconds


def place(user: User, rank: int, size: int) -> dict[str, str]:
    """The variables of a rank of a run without a launcher."""
    return {
        "ZCACTOR_RANK": str(rank), "ZCACTOR_SIZE": str(size), "ZCACTOR_RUN": user.mark, "ZCACTOR_HEAD": "127.0.0.1"
    }  # fmt: skip


class BareEtcd:
    """A client of etcd that makes bare commits, over one connection."""

    _BODY: Final = json.dumps({"key": "YmFyZQ==", "value": base64.b64encode(b"x" * 200).decode()}).encode()

    def __init__(self, etcd: Etcd) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", etcd.ports[0], timeout=PATIENCE)

    def commit(self) -> None:
        """Make a commit."""
        self._connection.request("POST", "/v3/kv/put", self._BODY)
        answer = self._connection.getresponse()
        answer.read()
        if answer.status != http.client.OK:
            raise RuntimeError(f"etcd has answered {answer.status}")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
