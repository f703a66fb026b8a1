"""Run a command where the kernel has an RDMA device: in a virtual machine, over this machine's own files.

::

    python tools/vm.py check                      # can it run here? exit 1 and one line when it cannot
    python tools/vm.py prepare                    # install and build what is missing
    python tools/vm.py run -- ibv_devinfo -v      # prepare, boot, run, and exit with the command's status
    python tools/vm.py run --hosts 2 -- sh -c '...'

Few machines have RDMA hardware, and the soft-RoCE driver (``rdma_rxe``) needs a kernel into which modules may be
loaded. So qemu boots Debian's kernel, in software emulation: no KVM, no privileges. A guest sees the files of its host,
read-only below a layer in its own memory that takes what it writes: this checkout, its virtual environment and the
installed libraries work there under the same paths, and nothing a guest does stays. It has the device ``rxe0`` with a
RoCE v2 GID at index 1, root's rights, and no network but that to the other guest.

The command finds in its environment, besides what it was given:

- ``VM_HOST``: which host it runs on, 1 or 2; ``VM_HOSTS``: how many there are;
- ``VM_ADDRESS``: the IPv4 address of this host; ``VM_PEER``: that of the other one, or its own when there is one host.

A guest runs 10 to 20 times slower than the machine, so that times in it compare only with other times in it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import lzma
import os
import platform
import re
import secrets
import selectors
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

PACKAGES = (
    "busybox-static",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "kmod",
    "perftest",
    "python3-pyverbs",
    "qemu-system-x86",
    "rdma-core",
)
"""Debian packages: the emulator, what builds the initial file system, and what guests use from the host's files."""

KERNEL = "linux-image-amd64"
"""The package that depends on Debian's current kernel. The kernel is unpacked, never installed."""

MODULES = (
    "crc32_generic",  # the soft-RoCE driver asks the kernel for "crc32" and refuses every interface without it
    "virtio_pci",
    "virtio_console",
    "virtio_net",
    "virtio_rng",
    "9pnet_virtio",
    "9p",
    "overlay",
    "rdma_rxe",
    "ib_uverbs",
    "rdma_ucm",
    "dummy",
    "veth",
)
"""Kernel modules that a guest loads, each after those it depends on."""

BUSYBOX = Path("/bin/busybox")
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
"""Where Debian's python3-pyverbs lies: out of sight of every interpreter but Debian's own."""

FORWARDED = ("HOME", "LANG", "LC_ALL", "PATH", "PYTHONPATH", "VIRTUAL_ENV")
"""Environment variables that a guest's command has from here."""

TAIL = 60
"""How many of a guest's last console lines an error shows."""

INIT = r"""#!/bin/busybox sh
# First program of a guest: loads the drivers and makes the host's root, under a layer in memory, its own.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module"; done </modules/order
mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro host /lower &&
mount -t tmpfs -o mode=755,size=75% upper /upper &&
mkdir /upper/data /upper/work &&
mount -t overlay -o lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work root /root &&
mount -t tmpfs -o mode=755 run /root/run &&
cp -r /job /root/run/vm &&
cp /bin/busybox /root/run/vm/ &&
mount --move /dev /root/dev &&
mount --move /sys /root/sys &&
mount --move /proc /root/proc &&
exec switch_root /root /run/vm/start
echo "the host's root cannot be mounted"
poweroff -f
"""

START = r"""#!/run/vm/busybox sh
# Second program of a guest, over the host's files: sets up the device and the network, and runs the command.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
. /run/vm/settings  # host, hosts, address, peer, gid, nonce
give_up() {
    echo "$1"
    exec /run/vm/busybox poweroff -f
}
mkdir -p /dev/pts /dev/shm /run/lock
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr
# Two hosts must not pass for one: each has a name and an identity of its own.
/run/vm/busybox hostname "vm$host"
rm -f /etc/hostname /etc/hosts /etc/machine-id
echo "vm$host" >/etc/hostname
printf '127.0.0.1 localhost\n10.77.0.1 vm1\n10.77.0.2 vm2\n' >/etc/hosts
printf '%032x\n' "$host" >/etc/machine-id

ip link set lo up
# The device before the address: a peer that answers has its device.
rdma link add rxe0 type rxe netdev eth0 || give_up "rxe0 cannot be added"
ip addr add "$address/24" dev eth0 && ip link set eth0 up || give_up "eth0 cannot be set up"
# GIDs come a moment after the address, by a kernel thread.
tries=0
until [ "$(cat /sys/class/infiniband/rxe0/ports/1/gids/1)" = "$gid" ]; do
    [ $((tries += 1)) -le 200 ] || give_up "rxe0 has no GID for $address"
    /run/vm/busybox usleep 50000
done
if [ "$hosts" = 2 ]; then
    tries=0
    until /run/vm/busybox ping -c 1 -W 1 "$peer" >/dev/null 2>&1; do
        [ $((tries += 1)) -le 60 ] || give_up "$peer does not answer"
        /run/vm/busybox usleep 50000
    done
fi

for port in /sys/class/virtio-ports/*; do
    [ "$(cat "$port/name")" = output ] && output=/dev/${port##*/}
done
# The status follows the output through one pipe and one port, so that it is the last of it. Kernel messages and those
# of this program are on the console. The host ends the machine.
{
    printf '%s begin\n' "$nonce"
    env -i /bin/sh /run/vm/command </dev/null 2>&1
    printf '%s %s\n' "$nonce" "$?"
} | /run/vm/busybox cat >"$output"
while :; do /run/vm/busybox sleep 3600; done
"""


class Unavailable(RuntimeError):
    """Guests cannot run here; the message says why in one line."""


class GuestError(RuntimeError):
    """A guest ended without a status of its command: a kernel panic, a device that cannot be set up, or no emulator.

    Attributes:
        outputs: What the command wrote so far, for each host.
    """

    def __init__(self, message: str, outputs: tuple[str, ...]) -> None:
        """The message has the last lines of the guest's console, `outputs` what the commands wrote."""
        super().__init__(message)
        self.outputs = outputs


class GuestTimeoutError(GuestError, TimeoutError):
    """The command, or the boot before it, took longer than it may; the guests were ended."""


@dataclass(frozen=True)
class Image:
    """What a guest boots from."""

    version: str
    """The kernel's version as in ``uname -r``."""

    kernel: Path
    initramfs: Path


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    statuses: tuple[int, ...]
    """For each host, the exit status of its command: 128 and the signal's number when a signal ended it."""

    outputs: tuple[str, ...]
    """For each host, what its command wrote to standard output and standard error."""

    boot: float
    """Seconds until the command had started on every host."""

    seconds: float
    """Seconds in all."""

    @property
    def status(self) -> int:
        """The first status that is not 0, else 0."""
        return next(filter(None, self.statuses), 0)

    @property
    def output(self) -> str:
        """The output of all hosts, one after the other."""
        return "".join(self.outputs)


def check(*, prepared: bool = True) -> None:
    """Tell whether guests can run here. Asks no network and changes nothing.

    Args:
        prepared: They must be able to run as things are. False: it is enough that `prepare` may get what is missing.

    Raises:
        Unavailable: they cannot. The machine is not Linux on x86-64; a package is missing, and this process may not
            install it, because it is not root or there is no apt with Debian's packages; or `prepare` has not run.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Unavailable(f"guests need Linux on x86-64, and this is {platform.system()} on {platform.machine()}")
    if shutil.which("dpkg-query") is None or shutil.which("apt-get") is None or distribution() != "debian":
        raise Unavailable("guests boot Debian's kernel, and there are no apt and dpkg for Debian's packages here")
    missing = _missing_packages()
    if missing and os.geteuid() != 0:
        raise Unavailable(f"not root, which it takes to install {' '.join(missing)}")
    if prepared and (missing or _newest_image() is None):
        raise Unavailable("not prepared; run python tools/vm.py prepare")


def prepare(say: Callable[[str], None] = lambda line: None) -> Image:
    """Get what guests need, once: packages, Debian's kernel, and the initial file system made of its modules.

    Packages are installed only as root. Everything else lies in `cache_folder`, by the kernel's version, and is used
    until that folder is removed. Processes that do this at the same time wait for each other.

    Args:
        say: Called with a line before each step that takes long.

    Returns:
        What guests boot from.

    Raises:
        Unavailable: guests cannot run here, see `check`, or a package cannot be had, for one without a network.
        OSError: the cache folder cannot be written.
    """
    check(prepared=False)
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits; falls with the process that holds it
        missing = _missing_packages()
        if missing:
            say(f"installing {' '.join(missing)}")
            _update_lists()
            _fetch(
                "apt-get", "install", "-qq", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", *missing
            )
        image = _newest_image()
        if image is None:
            package = _kernel_package()
            say(f"unpacking {package}")
            image = _build_image(cache, package)
            say(f"built {image.initramfs}")
    _pyverbs_folder(cache)
    return image


def run(
    command: Sequence[str],
    *,
    hosts: int = 1,
    memory_mib: int = 2048,
    timeout: float = 300,
    memlock_kib: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    on_line: Callable[[int, str], None] = lambda host, line: None,
) -> Result:
    """Boot one or two guests, run a command on each, and end them.

    Two guests are two hosts on one Ethernet segment, 10.77.0.1 and 10.77.0.2, with names, MAC addresses and machine
    identities of their own. Each starts its command when the other answers, and stays up until both have ended.

    A Python that Debian's python3-pyverbs was built for can import it, whether or not it is Debian's: the command's own
    interpreter, for another program the one beside it and the first ``python3`` on its PATH, and this process's own.

    Args:
        command: Program and arguments; each host runs it, and finds in ``VM_HOST`` which one it is.
        hosts: 1 or 2.
        memory_mib: Memory of each guest. What its command writes to files lies there, too.
        timeout: Seconds for everything, booting included.
        memlock_kib: How much memory the command may lock and so register with the device; then it does not have the
            capability that lifts this limit for root. None: without limit.
        env: Variables that are added to those in `FORWARDED`, or replace them.
        cwd: The folder it runs in, by default the current one.
        on_line: Called with the host's number and each line of output as it comes, without the line's end.

    Returns:
        The statuses and outputs.

    Raises:
        ValueError: no such number of hosts, an empty command, or a variable's name that a shell does not take.
        FileNotFoundError: there is no folder `cwd`.
        Unavailable: guests cannot run here, or `prepare` has not run.
        GuestTimeoutError: the time ran out.
        GuestError: a guest ended on its own.
    """
    started = time.monotonic()
    if hosts not in (1, 2):
        raise ValueError(f"hosts is {hosts}, and there can be 1 or 2")
    if not command:
        raise ValueError("the command is empty")
    for name in env or {}:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]*", name):
            raise ValueError(f"{name!r} is no name of an environment variable")
    folder = Path(cwd or ".").resolve()
    if not folder.is_dir():
        raise FileNotFoundError(f"the command's folder {folder} does not exist")
    check()
    image = _newest_image()
    if image is None:
        raise Unavailable("the cache folder was removed a moment ago; run python tools/vm.py prepare")
    variables = {name: os.environ[name] for name in FORWARDED if name in os.environ} | dict(env or {})
    # A child's pipe is no terminal, and Python would keep its lines for itself until the end.
    variables.setdefault("PYTHONUNBUFFERED", "1")
    if _imports_pyverbs(command[0], variables.get("PATH", os.defpath)):
        paths = [str(_pyverbs_folder(cache_folder())), variables.get("PYTHONPATH", "")]
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
            guest.start(image, memory_mib, cable)
        _follow(guests, started + timeout, on_line)
        return Result(
            statuses=tuple(guest.status or 0 for guest in guests),
            outputs=tuple(guest.output() for guest in guests),
            boot=max(guest.began for guest in guests) - started,
            seconds=time.monotonic() - started,
        )


def cache_folder() -> Path:
    """Where `prepare` leaves the kernel: ``zcactor/vm`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "zcactor" / "vm"


def distribution() -> str:
    """The short name that this machine's distribution gives itself, or an empty string."""
    try:
        return platform.freedesktop_os_release()["ID"]
    except OSError:
        return ""


# --- Guests -----------------------------------------------------------------------------------------------------------


@dataclass
class _Guest:
    """One virtual machine: its emulator's process and what has come from it."""

    host: int
    hosts: int
    folder: Path
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    """Starts the lines that are not of the command but about it."""

    process: subprocess.Popen[bytes] | None = None
    reader: IO[bytes] | None = None
    """Where its command's output comes out."""

    began: float = 0.0
    """When the command started, in `time.monotonic`; 0 before."""

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
        """The common initial file system and, as a second archive behind it, what is this run's alone."""
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
            files = {"init": INIT, "job/start": START, "job/settings": text, "job/command": command}
            _write_archive(archive, {"job/": b""} | {name: content.encode() for name, content in files.items()})

    def start(self, image: Image, memory_mib: int, cable: socket.socket | None) -> None:
        """Start the emulator; `cable` leads to the other guest."""
        self.console.touch()
        read_end, write_end = os.pipe()
        self.reader = os.fdopen(read_end, "rb", buffering=0)
        passed = [write_end]
        network = "hubport,id=net,hubid=0"  # a switch with nothing else on it
        if cable is not None:
            passed.append(cable.fileno())
            network = f"stream,id=net,server=off,addr.type=fd,addr.str={cable.fileno()}"
        append = (
            "console=ttyS0 quiet panic=-1 nokaslr mitigations=off audit=0 nowatchdog rcupdate.rcu_cpu_stall_suppress=1"
        )
        arguments = [
            # Should this process be killed outright, the emulator ends with it.
            *("setpriv", "--pdeathsig", "KILL", "--"),
            *("qemu-system-x86_64", "-no-user-config", "-nodefaults", "-display", "none", "-no-reboot"),
            *("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(memory_mib)),
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
        """Take what came from the guest; the lines in it that are the command's."""
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
        """What the command wrote so far."""
        return "".join(self.lines) + ("" if self.status is not None else self.partial.decode(errors="replace"))

    def state(self) -> str:
        """How far it is, and the end of its console and of what its emulator had to say."""
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
    """Read what the guests say until each has said its command's status.

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
    """Whether a Python that `program` may run was one that Debian's pyverbs is for, and has no pyverbs of its own."""
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


# --- Preparation ------------------------------------------------------------------------------------------------------


def _missing_packages() -> list[str]:
    """Those of `PACKAGES` that are not installed."""
    query = ["dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n", *PACKAGES]
    listing = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    installed = {
        name for name, _, status in (line.partition(" ") for line in listing.splitlines()) if status == "installed"
    }
    return [name for name in PACKAGES if name not in installed]


def _fetch(*command: str, cwd: Path | None = None) -> str:
    """Run a package tool; what it printed.

    Raises:
        Unavailable: it failed; the message has the last line of its errors.
    """
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    done = subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise Unavailable(f"{' '.join(command[:2])} failed with status {done.returncode}: {last}")
    return done.stdout


def _update_lists() -> None:
    """Let apt learn what there is."""
    with contextlib.suppress(Unavailable):  # one of many sources may be out of reach, and not the one that matters
        _fetch("apt-get", "update", "-qq")


def _kernel_package() -> str:
    """The package of Debian's current kernel.

    Raises:
        Unavailable: apt knows none.
    """
    if os.geteuid() == 0:
        _update_lists()
    found = re.search(r"Depends: (linux-image-\d\S*)", _fetch("apt-cache", "depends", KERNEL))
    if found is None:
        raise Unavailable(f"apt knows no kernel that {KERNEL} depends on")
    return found.group(1)


def _build_image(cache: Path, package: str) -> Image:
    """Download and unpack a kernel, and leave in `cache` what guests need of it.

    Raises:
        Unavailable: the package cannot be had, or its kernel lacks a module.
    """
    # A folder of its own that gets its name when it is whole, so that an interrupted run leaves nothing half done.
    with tempfile.TemporaryDirectory(prefix="unpack-", dir=cache) as scratch:
        work = Path(scratch)
        _fetch("apt-get", "download", "-qq", package, cwd=work)
        tree = work / "tree"
        _fetch("dpkg", "-x", str(next(work.glob("*.deb"))), str(tree))
        kernel = next((tree / "boot").glob("vmlinuz-*"))
        version = kernel.name.removeprefix("vmlinuz-")
        _fetch("/sbin/depmod", "-b", str(tree), version)
        modules: dict[str, Path] = {}  # in the order in which they are loaded
        for module in MODULES:
            # Without a configuration: this machine's is not the guest's.
            listing = _fetch(
                "/sbin/modprobe", "-C", os.devnull, "-d", str(tree), "-S", version, "--show-depends", module
            )
            for line in listing.splitlines():
                verb, _, rest = line.partition(" ")
                if verb == "insmod":  # else it is built in
                    path = Path(rest.split()[0])
                    modules[path.name.removesuffix(".xz")] = path
        files = {f"{name}/": b"" for name in ("bin", "dev", "lower", "modules", "proc", "root", "sys", "upper")}
        files["bin/busybox"] = BUSYBOX.read_bytes()
        files["modules/order"] = "".join(f"{name}\n" for name in modules).encode()
        for name, path in modules.items():
            content = path.read_bytes()
            files[f"modules/{name}"] = lzma.decompress(content) if path.suffix == ".xz" else content
        ready = work / "ready"
        ready.mkdir()
        (ready / "kernel").write_bytes(_unpacked_kernel(kernel.read_bytes()))
        with (ready / "initramfs").open("wb") as archive:
            _write_archive(archive, files)
        target = cache / f"{version}-{_recipe()}"
        shutil.rmtree(target, ignore_errors=True)
        ready.rename(target)
    return Image(version, target / "kernel", target / "initramfs")


def _unpacked_kernel(boot: bytes) -> bytes:
    """The kernel inside a bootable file; the file itself where its kernel is not compressed by xz.

    The emulator starts either, but a kernel that unpacks itself in emulation does that for 3 seconds at every boot.
    """
    sectors = boot[0x1F1] or 4  # names of the boot protocol: setup_sects, and payload_offset and payload_length below
    offset, length = struct.unpack_from("<II", boot, 0x248)
    payload = boot[512 * (sectors + 1) + offset :][:length]
    # Behind the compressed data stands their size, which is not theirs.
    return lzma.LZMADecompressor().decompress(payload) if payload.startswith(b"\xfd7zXZ\0") else boot


def _newest_image() -> Image | None:
    """The image with the newest kernel that was made by this program's recipe."""
    images = []
    for folder in cache_folder().glob(f"[0-9]*-{_recipe()}"):
        image = Image(folder.name.removesuffix(f"-{_recipe()}"), folder / "kernel", folder / "initramfs")
        if image.kernel.is_file() and image.initramfs.is_file():
            images.append(image)
    return max(images, key=lambda image: [int(part) for part in re.findall(r"\d+", image.version)], default=None)


def _recipe() -> str:
    """Changes when an image of the same kernel would get other contents."""
    return hashlib.sha256(" ".join(MODULES).encode()).hexdigest()[:8]


def _pyverbs_folder(cache: Path) -> Path:
    """A folder for PYTHONPATH with pyverbs and nothing else of Debian's Python packages."""
    folder = cache / "pyverbs"
    folder.mkdir(exist_ok=True)
    link = folder / PYVERBS.name
    if not link.is_symlink():
        with contextlib.suppress(FileExistsError):  # another process was first
            link.symlink_to(PYVERBS)
    return folder


def _write_archive(archive: IO[bytes], files: Mapping[str, bytes]) -> None:
    """Write files in the cpio format that the kernel unpacks; a name that ends in a slash is a folder.

    Archives behind each other are one to the kernel when each starts at a multiple of 4 bytes, as these do.
    """

    def entry(name: str, mode: int, content: bytes) -> None:
        path = name.encode() + b"\0"
        # inode, mode, user, group, links, time, size, device and its own (two numbers each), length of name, checksum
        numbers = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
        for part in (b"070701" + b"".join(b"%08x" % number for number in numbers) + path, content):
            archive.write(part + bytes(-len(part) % 4))

    for name, content in files.items():
        kind = stat.S_IFDIR if name.endswith("/") else stat.S_IFREG
        entry(name.rstrip("/"), kind | 0o755, content)
    entry("TRAILER!!!", 0, b"")


# --- Program ----------------------------------------------------------------------------------------------------------


def _stop(number: int, frame: FrameType | None) -> None:
    """Leave as by an exception, so that guests are ended."""
    del frame
    sys.exit(128 + number)


def main() -> int:
    """Check, prepare or run; returns the exit status.

    That of ``run`` is the command's, or 124 when the time ran out, 125 when a guest ended on its own, and 69 when
    guests cannot run here.
    """
    parser = argparse.ArgumentParser(description="Run a command in a virtual machine that has an RDMA device.")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("check", help="exit 1 and say why when guests cannot run here")
    actions.add_parser("prepare", help="install and build what is missing")
    runner = actions.add_parser("run", help="prepare, boot, and run a command")
    runner.add_argument("--hosts", type=int, choices=(1, 2), default=1, help="guests (default: %(default)s)")
    runner.add_argument("--memory", type=int, default=2048, metavar="MIB", help="of each (default: %(default)s)")
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
