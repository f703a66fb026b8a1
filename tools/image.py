"""Build the container image of ``Containerfile`` from the wheel in ``dist/``, and run zcactor in it.

::

    python tools/image.py                              # on Debian's packages, with the sources of this machine
    python tools/image.py --base python:3.11-slim      # on another image

The result is ``dist/zcactor-VERSION.oci.tar``, which ``podman load`` and ``docker load`` read. Buildah builds it, and
where no image is named mmdebstrap makes the base, so no registry of images is needed. Both are packages of Debian. Root
runs it, or a user for whom buildah may map further users.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["Failure", "main", "wheel_for"]

ROOT: Final = Path(__file__).resolve().parent.parent
_PACKAGES: Final = "python3,python3-venv"
_UNREAD: Final = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*")
"""The files of packages that nobody reads in a container."""
_PROGRAM: Final = """
import os
import numpy as np
import zcactor as zc

@zc.actor
class Sum:
    def of(self, x):
        return float(x.sum()), os.getuid()

async def main():
    async with zc.init():
        found = await (await Sum.spawn()).of(np.ones(1 << 20))
        assert found[0] == 1 << 20 and found[1] != 0 and zc.stats().bytes_copied == 0, found

zc.run(main())
"""
"""A program that fails where an array is not passed by reference, or where root runs it."""


class Failure(Exception):
    """A reason why there is no image, in one sentence."""


def wheel_for(python: str, folder: Path) -> Path:
    """Find the wheel of a version of Python for this machine.

    Args:
        python: as in ``"3.11"``.
        folder: the folder with the packages.

    Raises:
        Failure: there is no such wheel.
    """
    tag = f"cp{python.replace('.', '')}"
    found = sorted(folder.glob(f"zcactor-*-{tag}-{tag}-*_{platform.machine()}.whl"))
    if not found:
        raise Failure(
            f"{folder} has no wheel for the base's Python {python}: run 'make dist' or 'make wheels WHEELS={python}' "
            "first"
        )
    return found[-1]


def _run(*words: str | Path, given: bytes | None = None) -> str:
    """Run a command, and return its output.

    Raises:
        Failure: the command is not installed, or fails. The message has its output.
    """
    line = [str(word) for word in words]
    if shutil.which(line[0]) is None:
        raise Failure(f"{line[0]} is not installed: apt install buildah mmdebstrap")
    done = subprocess.run(line, input=given, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        raise Failure(f"{output}\n{shlex.join(line)} failed, with status {done.returncode}")
    return output


def _debian(folder: Path) -> str:
    """Make a base of Debian's packages in `folder`, of the release of this machine and from its sources. Returns the
    line that begins a build on it."""
    listed = [*Path("/etc/apt/sources.list.d").glob("*.sources"), *Path("/etc/apt").glob("sources.list")]
    sources = b"\n\n".join(path.read_bytes() for path in listed)
    if not sources:
        raise Failure("this machine has no sources of Debian's packages: name an image, as in --base python:3.11-slim")
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    unread = [f"--dpkgopt=path-exclude={path}" for path in _UNREAD]
    _run(
        "mmdebstrap", "--variant=minbase", f"--include={_PACKAGES}", *unread, release["VERSION_CODENAME"],
        folder / "base.tar", "-", given=sources,
    )  # fmt: skip
    return "FROM scratch\nADD base.tar /\n"


def build(base: str | None) -> Path:
    """Build the image, run zcactor in it, and write it to ``dist/``.

    Args:
        base: the name of an image with Python and its module venv; None makes one of Debian's packages.

    Raises:
        Failure: a step fails, or there is no wheel for the Python of the base.
    """
    with tempfile.TemporaryDirectory(prefix="zcactor-image-") as temporary:
        folder = Path(temporary)
        store = "--storage-driver", "vfs", "--root", folder / "store", "--runroot", folder / "run"

        def buildah(command: str, *words: str | Path) -> str:
            return _run("buildah", *store, command, *words).strip()

        try:
            if base is None:
                print("making a base of Debian's packages ...", file=sys.stderr)
                (folder / "Containerfile").write_text(_debian(folder))
                base = "localhost/zcactor-base"
                buildah("build", "--isolation", "chroot", "--tag", base, folder)
                (folder / "base.tar").unlink()
            container = buildah("from", "--isolation", "chroot", base)
            asked = "import sys; print(*sys.version_info[:2], sep='.')"
            python = buildah("run", "--isolation", "chroot", container, "--", "python3", "-c", asked)
            wheel = wheel_for(python, ROOT / "dist")
            print(f"installing {wheel.name} and what it needs ...", file=sys.stderr)
            (folder / "wheels").mkdir()
            _run(
                sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--python-version",
                python, "--dest", folder / "wheels", f"{wheel}[cluster]",
            )  # fmt: skip
            shutil.copy(ROOT / "Containerfile", folder)
            name = f"zcactor:{wheel.name.split('-')[1]}"
            buildah("build", "--isolation", "chroot", "--build-arg", f"BASE={base}", "--squash", "--tag", name, folder)
            container = buildah("from", "--isolation", "chroot", name)
            for words in (["zcactor", "doctor"], ["python", "-c", _PROGRAM]):
                buildah("run", "--isolation", "chroot", container, "--", *words)
            made = ROOT / "dist" / f"{name.replace(':', '-')}.oci.tar"
            made.unlink(missing_ok=True)
            buildah("push", name, f"oci-archive:{made}:{name}")
            return made
        finally:
            if (folder / "store").exists():
                buildah("rm", "--all")


def main(words: list[str]) -> int:
    """Build; print a line about the image. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the container image into dist/.")
    parser.add_argument("--base", metavar="IMAGE", help="an image with Python; default: Debian's packages")
    try:
        made = build(parser.parse_args(words).base)
    except Failure as failure:
        print(f"image: {failure}", file=sys.stderr)
        return 1
    print(f"dist/{made.name}: {made.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
