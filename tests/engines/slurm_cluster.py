"""A real Slurm cluster of a made-up user, whose nodes are virtual ones of this machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
from collections.abc import Iterator

import psutil

from tests.driver.programs import processes, until
from tests.engines.launching import PATIENCE, User, unused_ports

__all__ = ["kill_node", "missing", "slurm"]

_NEEDED = ("munged", "slurmctld", "slurmd", "srun")
_CONF = """
ClusterName=zcactor
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdTimeout=10
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _path() -> str:
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin"])


def missing() -> str | None:
    """The reason why Slurm cannot run here; None where it can."""
    names = [name for name in _NEEDED if shutil.which(name, path=_path()) is None]
    if names:
        return f"{', '.join(names)} not installed: make test-engines does that as root on Debian"
    return None if os.geteuid() == 0 else "Slurm's daemons have to be root"


@contextlib.contextmanager
def slurm(count: int) -> Iterator[User]:
    """The user of a cluster of so many nodes, which are idle."""
    with User() as made:
        folder = made.folder
        made.variables.update(PATH=_path(), SLURM_CONF=str(folder / "slurm.conf"))
        folder.chmod(0o755)  # munged wants a way to its socket for everybody
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(64))
        port, *ports = unused_ports(1 + count)
        nodes = "\n".join(
            f"NodeName=n{number} NodeHostname=localhost NodeAddr=127.0.0.1 Port={each} CPUs=2 State=UNKNOWN"
            for number, each in enumerate(ports, 1)
        )
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder, port=port, nodes=nodes))
        made.start(
            "munged", "--foreground", "--force", f"--socket={folder}/munge.sock", f"--key-file={key}",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed",
            name="munged",
        )  # fmt: skip
        until((folder / "munge.sock").exists, "munged", PATIENCE)
        made.start("slurmctld", "-D", "-i", name="slurmctld")
        for number in range(1, 1 + count):
            (folder / f"spool-n{number}").mkdir()
            made.start("slurmd", "-D", "-N", f"n{number}", name=f"slurmd-{number}")
        until(lambda: made.done_beside("sinfo", "-h", "-o", "%D %T")[1] == f"{count} idle\n", "idle nodes", PATIENCE)
        yield made


def kill_node(user: User, name: str) -> None:
    """Kill a node's slurmd, its step's daemon and all tasks, as the loss of a host does."""
    tasks = {psutil.Process(pid) for pid in user.having({"SLURMD_NODENAME": name})}
    above = {parent for task in tasks for parent in task.parents() if parent.name() == "slurmstepd"}
    daemons = [pid for pid, line in processes(user.mark).items() if line.strip().endswith(f" -N {name}")]
    for each in (*map(psutil.Process, daemons), *above, *tasks):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGKILL)
