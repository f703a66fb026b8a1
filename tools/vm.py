"""Run a command where the kernel has an RDMA device: in a virtual machine, over this machine's own files.

::

    python tools/vm.py check                      # can it run here? exit 1 and one line when it cannot
    python tools/vm.py prepare                    # install and build the missing parts
    python tools/vm.py run -- ibv_devinfo -v      # prepare, boot, run, and exit with the command's status
    python tools/vm.py run --hosts 2 -- sh -c '...'

Few machines have RDMA hardware, and the soft-RoCE driver (``rdma_rxe``) needs a kernel that allows loading modules. So
qemu boots Debian's kernel, in software emulation: no KVM, no privileges. A guest sees the files of its host, read-only
below a layer in the guest's own memory that takes all writes: this checkout, its virtual environment and the installed
libraries work there under the same paths, and no change in a guest stays. It has the device ``rxe0`` with a RoCE v2 GID
at index 1, root's rights, and no network but that to the other guest.

The command finds these in its environment, besides the variables passed on from here:

- ``VM_HOST``: the number of its host, 1 or 2; ``VM_HOSTS``: the number of hosts;
- ``VM_ADDRESS``: the IPv4 address of this host; ``VM_PEER``: that of the other host, or its own when there is one host.

A guest runs 10 to 20 times slower than the machine, so that times in it compare only with other times in it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

if __name__ == "__main__":  # a script's path begins with its own folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.vm_clock import counter_khz
from tools.vm_image import (
    PYVERBS,
    Image,
    Unavailable,
    cache_folder,
    check,
    distribution,
    newest_image,
    prepare,
    pyverbs_folder,
    write_archive,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

__all__ = [
    "FORWARDED",
    "PYVERBS",
    "TAIL",
    "GuestError",
    "GuestTimeoutError",
    "Image",
    "Result",
    "Unavailable",
    "check",
    "distribution",
    "main",
    "prepare",
    "run",
]

FORWARDED = ("HOME", "LANG", "LC_ALL", "PATH", "PYTHONPATH", "VIRTUAL_ENV")
"""Environment variables that a guest's command inherits from here."""

PROCESSOR = "Nehalem"
"""The emulated processor: the oldest that runs NumPy's wheels (x86-64-v2), for newer ones take longer. Copying by ``rep
movsb`` or in registers of AVX halves the rate of a READ, and where the emulator offers all that it knows, the kernel
does not trust the time stamp counter and asks a device for the time, which takes twice as long."""

LEFT_OUT = (
    *("nokaslr", "mitigations=off", "audit=0", "apparmor=0", "nowatchdog", "rcupdate.rcu_cpu_stall_suppress=1"),
    *("init_on_alloc=0", "hardened_usercopy=off", "randomize_kstack_offset=off", "tsc=reliable"),
    "rcupdate.rcu_expedited=1",
)
"""Parameters that spare the guest's kernel work that only costs time here: guards against strangers, doubts of its
clock, waiting for idle processors when a device or one of its objects is removed."""

TAIL = 60
"""The last console lines of a guest that an error shows."""


class GuestError(RuntimeError):
    """A guest ended without a status of its command: a kernel panic, a device that cannot be set up, or no emulator.

    Attributes:
        outputs: the output of the command so far, for each host.
    """

    def __init__(self, message: str, outputs: tuple[str, ...]) -> None:
        """The message has the last lines of the guest's console; `outputs` has the commands' output so far."""
        super().__init__(message)
        self.outputs = outputs


class GuestTimeoutError(GuestError, TimeoutError):
    """The command, or the boot before it, took longer than it may; the guests were ended."""


@dataclass(frozen=True)
class Result:
    """The end of a command."""

    statuses: tuple[int, ...]
    """For each host, the exit status of its command: 128 and the signal's number when a signal ended it."""

    outputs: tuple[str, ...]
    """For each host, the command's standard output and standard error."""

    boot: float
    """Seconds until the command had started on every host."""

    seconds: float
    """Seconds of the whole run."""

    @property
    def status(self) -> int:
        """The first status that is not 0, else 0."""
        return next(filter(None, self.statuses), 0)

    @property
    def output(self) -> str:
        """The output of all hosts, one after the other."""
        return "".join(self.outputs)


def run(
    command: Sequence[str],
    *,
    hosts: int = 1,
    memory_mib: int = 2048,
    processors: int = 1,
    counting: bool = False,
    timeout: float = 300,
    memlock_kib: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    on_line: Callable[[int, str], None] = lambda host, line: None,
) -> Result:
    """Boot one or two guests, run a command on each, and end them.

    Two guests are two hosts on one Ethernet segment, 10.77.0.1 and 10.77.0.2, with names, MAC addresses and machine
    identities of their own. Each starts its command when the other answers, and stays up until both have ended.

    A Python for which Debian's python3-pyverbs was built can import it, whether or not it is Debian's: the command's
    own interpreter, for another program the one beside it and the first ``python3`` on its PATH, and this process's
    own.

    Args:
        command: Program and arguments; each host runs them, with the host's number in ``VM_HOST``.
        hosts: 1 or 2.
        memory_mib: Memory of each guest. The files that its command writes lie there, too.
        processors: Processors of each guest. Two do the same work in half as much again of this machine's time, as
            interrupts between them are expensive in emulation; several guests use the machine better.
        counting: Whether the clock of each guest counts the instructions of its one processor, each a nanosecond. So
            times do not depend on what else the machine does (QEMU's documentation, "TCG Instruction Counting").
        timeout: Seconds for everything, booting included.
        memlock_kib: KiB of memory that the command may lock and so register with the device; then the command does not
            have the capability that lifts this limit for root. None: without limit.
        env: Variables that are added to those in `FORWARDED`, or replace them.
        cwd: The folder it runs in, by default the current one.
        on_line: Called with the host's number and each line of output as it comes, without the line's end.

    Returns:
        The statuses and outputs.

    Raises:
        ValueError: `hosts` is neither 1 nor 2, the command is empty, a shell does not take a variable's name, or
            instructions of several processors are to be counted.
        FileNotFoundError: the folder `cwd` does not exist.
        Unavailable: guests cannot run here, or `prepare` has not run.
        GuestTimeoutError: the time ran out.
        GuestError: a guest ended on its own.
    """
    started = time.monotonic()
    if hosts not in (1, 2):
        raise ValueError(f"hosts is {hosts}, and there can be 1 or 2")
    if not command:
        raise ValueError("the command is empty")
    if counting and processors != 1:
        raise ValueError(f"the instructions of {processors} processors cannot be counted: give a guest one")
    for name in env or {}:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]*", name):
            raise ValueError(f"{name!r} is no name of an environment variable")
    folder = Path(cwd or ".").resolve()
    if not folder.is_dir():
        raise FileNotFoundError(f"the command's folder {folder} does not exist")
    check()
    image = newest_image()
    if image is None:
        raise Unavailable("the cache folder was removed a moment ago; run python tools/vm.py prepare")
    variables = {name: os.environ[name] for name in FORWARDED if name in os.environ} | dict(env or {})
    # A child's pipe is not a terminal, and Python would hold its lines back until the end.
    variables.setdefault("PYTHONUNBUFFERED", "1")
    if _imports_pyverbs(command[0], variables.get("PATH", os.defpath)):
        paths = [str(pyverbs_folder(cache_folder())), variables.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = ":".join(filter(None, paths))

    guests: list[_Guest] = []
    with tempfile.TemporaryDirectory(prefix="zcactor-vm-") as scratch, contextlib.ExitStack() as stack:
        cables: Sequence[socket.socket | None] = [None]
        if hosts == 2:
            cables = [stack.enter_context(end) for end in socket.socketpair()]
        for host, cable in enumerate(cables, start=1):
            guest = _Guest(host, hosts, Path(scratch))
            guest.write_initrd(image, _command_script(guest, command, variables, folder, memlock_kib))
            stack.callback(guest.end)
            guests.append(guest)
            guest.start(image, memory_mib, processors, counting, cable)
        _follow(guests, started + timeout, on_line)
        return Result(
            statuses=tuple(guest.status or 0 for guest in guests),
            outputs=tuple(guest.output() for guest in guests),
            boot=max(guest.began for guest in guests) - started,
            seconds=time.monotonic() - started,
        )


# --- Guests -----------------------------------------------------------------------------------------------------------


@dataclass
class _Guest:
    """A virtual machine: its emulator's process, and the output from it."""

    host: int
    hosts: int
    folder: Path
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    """The start of lines about the command, which are not its output."""

    process: subprocess.Popen[bytes] | None = None
    reader: IO[bytes] | None = None
    """The reading end of its command's output."""

    began: float = 0.0
    """The time when the command started, by `time.monotonic`; 0 before."""

    status: int | None = None
    lines: list[str] = field(default_factory=list)
    partial: bytes = b""

    @property
    def address(self) -> str:
        return f"10.77.0.{self.host}"

    @property
    def peer(self) -> str:
        return f"10.77.0.{3 - self.host}" if self.hosts == 2 else self.address

    @property
    def console(self) -> Path:
        return self.folder / f"console{self.host}"

    @property
    def emulator(self) -> Path:
        return self.folder / f"emulator{self.host}"

    @property
    def initrd(self) -> Path:
        return self.folder / f"initrd{self.host}"

    def write_initrd(self, image: Image, command: str) -> None:
        """Write the common initial file system and, as a second archive behind it, the files of this run."""
        settings = {
            "host": str(self.host),
            "hosts": str(self.hosts),
            "address": self.address,
            "peer": self.peer,
            "gid": f"0000:0000:0000:0000:0000:ffff:0a4d:{self.host:04x}",
            "nonce": self.nonce,
        }
        text = "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
        with self.initrd.open("wb") as archive, image.initramfs.open("rb") as common:
            shutil.copyfileobj(common, archive)
            write_archive(archive, {"job/settings": text.encode(), "job/command": command.encode()})

    def start(
        self, image: Image, memory_mib: int, processors: int, counting: bool, cable: socket.socket | None
    ) -> None:
        """Start the emulator; `cable` leads to the other guest."""
        self.console.touch()
        read_end, write_end = os.pipe()
        self.reader = os.fdopen(read_end, "rb", buffering=0)
        passed = [write_end]
        network = "hubport,id=net,hubid=0"  # a switch with no other port
        if cable is not None:
            passed.append(cable.fileno())
            network = f"stream,id=net,server=off,addr.type=fd,addr.str={cable.fileno()}"
        # By itself the kernel compares the counter with an emulated timer. On a busy machine its clock then runs six
        # times too fast now and then, and what may take 5 s gets one.
        khz = 1_000_000 if counting else counter_khz()
        append = " ".join(["console=ttyS0 quiet panic=-1", f"tsc_early_khz={khz}", *LEFT_OUT])
        accelerator = ("tcg,thread=single", "-icount", "shift=0") if counting else ("tcg,thread=multi",)
        arguments = [
            # Should this process be killed outright, the emulator ends with it.
            *("setpriv", "--pdeathsig", "KILL", "--"),
            *("qemu-system-x86_64", "-no-user-config", "-nodefaults", "-display", "none", "-no-reboot"),
            *("-accel", *accelerator, "-cpu", PROCESSOR, "-smp", str(processors), "-m", str(memory_mib)),
            *("-kernel", str(image.kernel), "-initrd", str(self.initrd), "-append", append),
            *("-serial", f"file:{self.console}"),
            *("-add-fd", f"fd={write_end},set=1", "-chardev", "file,id=output,path=/dev/fdset/1,append=on"),
            *("-device", "virtio-serial-pci", "-device", "virtserialport,chardev=output,name=output"),
            *("-device", "virtio-rng-pci"),
            *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
            *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
            *("-netdev", network),
            *("-device", f"virtio-net-pci,netdev=net,mac=52:54:00:77:00:{self.host:02x},romfile=,host_mtu=4200"),
        ]
        try:
            with self.emulator.open("wb") as said:
                self.process = subprocess.Popen(
                    arguments, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, pass_fds=passed
                )
        finally:
            os.close(write_end)

    def feed(self, data: bytes) -> Iterator[str]:
        """Take bytes from the guest; yields the command's lines in them."""
        *whole, self.partial = (self.partial + data).split(b"\n")
        for raw in whole:
            line, mark, word = raw.decode(errors="replace").partition(self.nonce)
            if not mark:
                self.lines.append(line + "\n")
                yield line
            elif word == " begin":
                self.began = time.monotonic()
            else:
                self.status = int(word)
                if line:  # the output did not end with a line's end
                    self.lines.append(line)
                    yield line
                return

    def output(self) -> str:
        """The command's output so far."""
        return "".join(self.lines) + ("" if self.status is not None else self.partial.decode(errors="replace"))

    def state(self) -> str:
        """The progress of the guest, and the last lines of its console and of its emulator's messages."""
        lines = []
        for path in (self.emulator, self.console):
            lines += path.read_text(errors="replace").splitlines()[-TAIL:]
        tail = "\n".join(f"    {line}" for line in lines if line.strip()) or "    nothing"
        return f"host {self.host} {'runs its command' if self.began else 'boots'}, and its console ends in\n{tail}"

    def end(self) -> None:
        """Kill the emulator, if it runs, and wait for it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self.reader is not None:
            self.reader.close()


def _command_script(
    guest: _Guest, command: Sequence[str], variables: Mapping[str, str], folder: Path, memlock_kib: int | None
) -> str:
    """The shell script that a guest runs in an empty environment."""
    about = {
        "VM_HOST": str(guest.host),
        "VM_HOSTS": str(guest.hosts),
        "VM_ADDRESS": guest.address,
        "VM_PEER": guest.peer,
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in {**about, **variables}.items()]
    words = list(command)
    if memlock_kib is not None:
        words = ["/usr/bin/setpriv", "--bounding-set", "-ipc_lock", "--", *words]
    lines += [
        f"ulimit -l {'unlimited' if memlock_kib is None else memlock_kib}",
        f"cd {shlex.quote(str(folder))} || exit 126",
        f"exec {shlex.join(words)}",
    ]
    return "\n".join(lines) + "\n"


def _follow(guests: Sequence[_Guest], deadline: float, on_line: Callable[[int, str], None]) -> None:
    """Read the guests' output until each has reported its command's status.

    Raises:
        GuestTimeoutError: `deadline` has passed.
        GuestError: a guest ended before.
    """
    with selectors.DefaultSelector() as selector:
        for guest in guests:
            assert guest.reader is not None
            selector.register(guest.reader, selectors.EVENT_READ, guest)
        while selector.get_map():
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events and time.monotonic() >= deadline:
                late = "; ".join(guest.state() for guest in guests if guest.status is None)
                raise GuestTimeoutError(f"no time left: {late}", tuple(guest.output() for guest in guests))
            for key, _ in events:
                guest = key.data
                data = guest.reader.read(65536)
                for line in guest.feed(data):
                    on_line(guest.host, line)
                if guest.status is not None:
                    selector.unregister(guest.reader)
                elif not data:
                    outputs = tuple(guest.output() for guest in guests)
                    raise GuestError(f"a guest ended on its own: {guest.state()}", outputs)


def _imports_pyverbs(program: str, path: str) -> bool:
    """Whether Debian's pyverbs was built for a Python that `program` may run, and that Python has no pyverbs of its
    own."""
    built = {name.group(1) for file in PYVERBS.glob("*.so") if (name := re.match(r"device\.(cpython-\d+)", file.name))}
    pythons = {sys.executable, shutil.which("python3", path=path)}
    if (found := shutil.which(program, path=path)) is not None:
        beside = Path(found).parent / "python3"
        pythons.add(found if Path(found).name.startswith("python") else shutil.which(beside))
    question = "import sys, importlib.util as u; print(sys.implementation.cache_tag, u.find_spec('pyverbs') is None)"
    for python in filter(None, pythons):
        answer = subprocess.run([python, "-c", question], capture_output=True, text=True, check=False).stdout.split()
        if answer[-1:] == ["True"] and answer[0] in built:
            return True
    return False


# --- Program ----------------------------------------------------------------------------------------------------------


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit by an exception, so that guests are ended."""
    del frame
    sys.exit(128 + number)


def main() -> int:
    """Check, prepare or run; returns the exit status.

    The status of ``run`` is the command's, or 124 when the time ran out, 125 when a guest ended on its own, and 69 when
    guests cannot run here.
    """
    parser = argparse.ArgumentParser(description="Run a command in a virtual machine that has an RDMA device.")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("check", help="exit 1 and say why when guests cannot run here")
    actions.add_parser("prepare", help="install and build what is missing")
    runner = actions.add_parser("run", help="prepare, boot, and run a command")
    runner.add_argument("--hosts", type=int, choices=(1, 2), default=1, help="guests (default: %(default)s)")
    runner.add_argument("--memory", type=int, default=2048, metavar="MIB", help="of each (default: %(default)s)")
    runner.add_argument("--processors", type=int, default=1, metavar="N", help="of each (default: %(default)s)")
    runner.add_argument("--counting", action="store_true", help="let the clock count instructions, a nanosecond each")
    runner.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="for all (default: %(default)s)")
    runner.add_argument("--memlock", type=int, metavar="KIB", help="what the command may lock (default: no limit)")
    runner.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="add a variable")
    runner.add_argument("--cwd", metavar="FOLDER", help="where the command runs (default: here)")
    runner.add_argument("command", nargs="+", help="program and arguments; put -- before them")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        if arguments.action == "check":
            check()
            return 0
        image = prepare(say=lambda line: print(line, file=sys.stderr, flush=True))
        if arguments.action == "prepare":
            print(image.kernel.parent)
            return 0
        prefix = "{0}| {1}" if arguments.hosts > 1 else "{1}"
        result = run(
            arguments.command,
            hosts=arguments.hosts,
            memory_mib=arguments.memory,
            processors=arguments.processors,
            counting=arguments.counting,
            timeout=arguments.timeout,
            memlock_kib=arguments.memlock,
            env=dict(pair.partition("=")[::2] for pair in arguments.env),
            cwd=arguments.cwd,
            on_line=lambda host, line: print(prefix.format(host, line), flush=True),
        )
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 1 if arguments.action == "check" else 69
    except GuestError as error:
        print(error, file=sys.stderr)
        return 124 if isinstance(error, GuestTimeoutError) else 125
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    print(f"booted in {result.boot:.1f} s, ended after {result.seconds:.1f} s", file=sys.stderr)
    return result.status


if __name__ == "__main__":
    sys.exit(main())
