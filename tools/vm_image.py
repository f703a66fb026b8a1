"""The image that the guests of `tools/vm.py` boot: packages, Debian's kernel, and an initial file system with its
modules.

`check` tells whether the image can be had here, `prepare` makes it, once for each kernel, and `newest_image` finds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import lzma
import os
import platform
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "PACKAGES",
    "PYVERBS",
    "Image",
    "Unavailable",
    "cache_folder",
    "check",
    "distribution",
    "newest_image",
    "prepare",
    "pyverbs_folder",
    "write_archive",
]

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
"""Debian packages: the emulator, the tools for the initial file system, and the programs that guests use from the
host's files."""

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
"""Kernel modules that a guest loads, each after the modules on which it depends."""

BUSYBOX = Path("/bin/busybox")
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
"""The folder of Debian's python3-pyverbs, which only Debian's own interpreter finds."""

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
mount -t overlay -o lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work root /newroot &&
mount -t tmpfs -o mode=755 run /newroot/run &&
cp -r /job /newroot/run/vm &&
cp /bin/busybox /newroot/run/vm/ &&
mount --move /dev /newroot/dev &&
mount --move /sys /newroot/sys &&
mount --move /proc /newroot/proc &&
exec switch_root /newroot /run/vm/start
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


FOLDERS = ("bin", "dev", "job", "lower", "modules", "newroot", "proc", "sys", "upper")
"""Folders of the initial file system. A run adds its own files in ``job``, which go to ``/run/vm``."""

SCRIPTS = {"init": INIT, "job/start": START}


class Unavailable(RuntimeError):
    """Guests cannot run here; the message gives the reason in one line."""


@dataclass(frozen=True)
class Image:
    """The files that a guest boots from."""

    version: str
    """The kernel's version as in ``uname -r``."""

    kernel: Path
    initramfs: Path


def check(*, prepared: bool = True) -> None:
    """Tell whether guests can run here. Asks no network and changes nothing.

    Args:
        prepared: Guests must be able to run without a further step. False: it is enough that `prepare` may get the
            missing parts.

    Raises:
        Unavailable: guests cannot run. The machine is not Linux on x86-64; a package is missing, and this process may
            not install it, because it is not root or the machine has no apt with Debian's packages; or `prepare` has
            not run.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Unavailable(f"guests need Linux on x86-64, and this is {platform.system()} on {platform.machine()}")
    if shutil.which("dpkg-query") is None or shutil.which("apt-get") is None or distribution() != "debian":
        raise Unavailable("guests boot Debian's kernel, and there are no apt and dpkg for Debian's packages here")
    missing = _missing_packages()
    if missing and os.geteuid() != 0:
        raise Unavailable(f"not root, which it takes to install {' '.join(missing)}")
    if prepared and (missing or newest_image() is None):
        raise Unavailable("not prepared; run python tools/vm.py prepare")


def prepare(say: Callable[[str], None] = lambda line: None) -> Image:
    """Get the image of guests, once: packages, Debian's kernel, and the initial file system made of its modules.

    Packages are installed only as root. All other files lie in `cache_folder`, by the kernel's version, and are used
    until that folder is removed. Processes that do this at the same time wait for each other.

    Args:
        say: Called with a line before each step that takes long.

    Returns:
        The image.

    Raises:
        Unavailable: guests cannot run here, see `check`, or a package cannot be had, for example without a network.
        OSError: the cache folder cannot be written.
    """
    check(prepared=False)
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits; the lock ends with the process that holds it
        missing = _missing_packages()
        if missing:
            say(f"installing {' '.join(missing)}")
            _update_lists()
            _fetch(
                "apt-get", "install", "-qq", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", *missing
            )
        image = newest_image()
        if image is None:
            package = _kernel_package()
            say(f"unpacking {package}")
            image = _build_image(cache, package)
            say(f"built {image.initramfs}")
    pyverbs_folder(cache)
    return image


def cache_folder() -> Path:
    """The folder in which `prepare` leaves the kernel: ``zcactor/vm`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "zcactor" / "vm"


def distribution() -> str:
    """The short name of this machine's distribution, or an empty string."""
    try:
        return platform.freedesktop_os_release()["ID"]
    except OSError:
        return ""


def _missing_packages() -> list[str]:
    """The packages in `PACKAGES` that are not installed."""
    query = ["dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n", *PACKAGES]
    listing = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    installed = {
        name for name, _, status in (line.partition(" ") for line in listing.splitlines()) if status == "installed"
    }
    return [name for name in PACKAGES if name not in installed]


def _fetch(*command: str, cwd: Path | None = None) -> str:
    """Run a package tool and return its output.

    Raises:
        Unavailable: the tool failed; the message has the last line of its errors.
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
    """Update apt's lists of packages."""
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
    """Download and unpack a kernel, and leave the files for guests in `cache`.

    Raises:
        Unavailable: the package cannot be had, or its kernel lacks a module.
    """
    # A temporary folder gets the final name when it is complete, so that an interrupted run leaves no incomplete one.
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
            # Without a configuration, for this machine's is not the guest's.
            listing = _fetch(
                "/sbin/modprobe", "-C", os.devnull, "-d", str(tree), "-S", version, "--show-depends", module
            )
            for line in listing.splitlines():
                verb, _, rest = line.partition(" ")
                if verb == "insmod":  # else it is built in
                    path = Path(rest.split()[0])
                    modules[path.name.removesuffix(".xz")] = path
        files = {f"{name}/": b"" for name in FOLDERS} | {name: text.encode() for name, text in SCRIPTS.items()}
        files["bin/busybox"] = BUSYBOX.read_bytes()
        files["modules/order"] = "".join(f"{name}\n" for name in modules).encode()
        for name, path in modules.items():
            content = path.read_bytes()
            files[f"modules/{name}"] = lzma.decompress(content) if path.suffix == ".xz" else content
        ready = work / "ready"
        ready.mkdir()
        (ready / "kernel").write_bytes(_unpacked_kernel(kernel.read_bytes()))
        with (ready / "initramfs").open("wb") as archive:
            write_archive(archive, files)
        target = cache / f"{version}-{_recipe()}"
        shutil.rmtree(target, ignore_errors=True)
        ready.rename(target)
    return Image(version, target / "kernel", target / "initramfs")


def _unpacked_kernel(boot: bytes) -> bytes:
    """The kernel inside a bootable file; the file itself where its kernel is not compressed by xz.

    The emulator starts either, but a kernel that unpacks itself in emulation takes 3 seconds for that at every boot.
    """
    sectors = boot[0x1F1] or 4  # names of the boot protocol: setup_sects, and payload_offset and payload_length below
    offset, length = struct.unpack_from("<II", boot, 0x248)
    payload = boot[512 * (sectors + 1) + offset :][:length]
    # The compressed data are followed by their size, which is not part of them.
    return lzma.LZMADecompressor().decompress(payload) if payload.startswith(b"\xfd7zXZ\0") else boot


def newest_image() -> Image | None:
    """The image with the newest kernel that was made by this program's recipe."""
    images = []
    for folder in cache_folder().glob(f"[0-9]*-{_recipe()}"):
        image = Image(folder.name.removesuffix(f"-{_recipe()}"), folder / "kernel", folder / "initramfs")
        if image.kernel.is_file() and image.initramfs.is_file():
            images.append(image)
    return max(images, key=lambda image: [int(part) for part in re.findall(r"\d+", image.version)], default=None)


def _recipe() -> str:
    """A digest that changes when an image of the same kernel would get other contents."""
    return hashlib.sha256(repr((MODULES, FOLDERS, SCRIPTS)).encode()).hexdigest()[:8]


def pyverbs_folder(cache: Path) -> Path:
    """A folder for PYTHONPATH with pyverbs and no other of Debian's Python packages."""
    folder = cache / "pyverbs"
    folder.mkdir(exist_ok=True)
    link = folder / PYVERBS.name
    if not link.is_symlink():
        with contextlib.suppress(FileExistsError):  # another process was first
            link.symlink_to(PYVERBS)
    return folder


def write_archive(archive: IO[bytes], files: Mapping[str, bytes]) -> None:
    """Write files in the cpio format that the kernel unpacks; a name that ends in a slash is a folder.

    The kernel takes several archives behind each other for one when each starts at a multiple of 4 bytes, as these do.
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
