"""A task of a job that `zcactor.cluster.submit` has submitted: a rank of a run, whose program says where the head is.

`begin` is what submitit calls in each task. It becomes a process of its own by exec: a rank forks its agent, and takes
signals, which submitit does as well.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Final

from zcactor.cluster.rendezvous import Meeting
from zcactor.standard import open_standard

__all__ = ["ADDRESS", "begin", "main"]

ADDRESS: Final = "ZCACTOR_ADDRESS"
_GRACE: Final = 3.0
"""Seconds in which the program has to end, as by default of ``zcactor run``; it does so at once."""
_OWN_MODULE: Final = "zcactor.cluster.submitted"


def begin(folder: str, key: str, nodes: int, timeout: float) -> None:
    """Become a rank of the run. Does not return.

    Args:
        folder: a folder that all hosts share.
        key: names the file in it with the head's address; see `Meeting`.
        nodes: the number of tasks.
        timeout: seconds in which all of them must have joined.
    """
    # Slurm sends submitit this signal 90 s before the job's time limit. A node has nothing to save then, and exec keeps
    # signals ignored.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", _OWN_MODULE, "rank", folder, key, str(nodes), str(timeout)]
    os.execv(sys.executable, command)


def main(arguments: list[str]) -> int:
    """Run one of the two programs, ``rank`` or ``hold``. Returns the exit status."""
    open_standard()
    if arguments[0] == "hold":
        return _hold(*arguments[1:])
    folder, key, nodes, timeout = arguments[1:]
    return _rank(folder, key, int(nodes), float(timeout))


def _rank(folder: str, key: str, nodes: int, timeout: float) -> int:
    from zcactor.cluster.run import Request, run_rank
    from zcactor.cluster.sources import decide
    from zcactor.config import load_config
    from zcactor.errors import ZcactorError

    program = (sys.executable, "-m", _OWN_MODULE, "hold", folder, key)
    os.environ.pop(ADDRESS, None)  # of the program that has submitted the job
    try:
        config, sources = load_config()
        spot = decide(os.environ).spot
        request = Request(program, nodes, timeout, _GRACE)
        return run_rank(config, spot, request, dict(os.environ), own_host=sources["host"] != "default")
    except (ZcactorError, OSError, ValueError, TypeError) as error:
        print(f"zcactor: {error}", file=sys.stderr, flush=True)
        return 1


def _hold(folder: str, key: str) -> int:
    """Write the head's address, and wait for SIGTERM."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    meeting = Meeting(Path(folder), key)
    meeting.publish(os.environ[ADDRESS])
    signal.sigwait(ends)
    meeting.remove(os.environ[ADDRESS])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
