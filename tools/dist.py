"""Build the packages into ``dist/``: the sdist, and from it the wheel of each interpreter.

::

    python tools/dist.py                             # the sdist and the wheel of this interpreter
    python tools/dist.py --manylinux 3.11 3.12 ...   # the sdist, and manylinux_2_28 wheels of each of these versions

The same commit gives the same bytes: dates are the commit's (or ``SOURCE_DATE_EPOCH``), modes do not depend on the
umask, and the versions of the tools stand in the group ``dist`` of ``pyproject.toml``. Files that git does not ignore
go in, committed or not, and each wheel gets the bill of materials that `tools/sbom.py` writes. Older packages in
``dist/`` are deleted. Interpreters are pyenv's or the path's.

manylinux_2_28 wheels are for x86-64, where they are built there, and for aarch64. Zig builds them against the symbols
of glibc 2.28, and ``auditwheel`` has to agree. On x86-64 the compiler of the machine builds ``_hot``, whose symbols are
old enough on their own: zig's runtime says that no processor has F16C or AVX2, and the sum of float16 takes 13 times as
long. For aarch64 no part asks for more than each processor has.

An interpreter's headers for x86-64 serve aarch64, too. ``pyconfig.h`` differs in four macros, and no header that an
extension includes depends on them: two about inline assembler, ``HAVE_USABLE_WCHAR_T`` and ``PY_SUPPORT_TIER``.
"""

from __future__ import annotations

import argparse
import gzip
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["MACHINES", "Failure", "compiler", "epoch", "interpreter", "left_out", "machines", "main", "repack"]

ROOT: Final = Path(__file__).resolve().parent.parent
GLIBC: Final = (2, 28)
"""The oldest glibc of the wheels: that of Debian 10, RHEL 8 and Ubuntu 18.10."""
MACHINES: Final = ("x86_64", "aarch64")
"""The processors that have wheels, as `platform.machine()` names them."""


class Failure(Exception):
    """A reason why there are no packages, in one sentence."""


def epoch(root: Path, environ: Mapping[str, str]) -> int:
    """Return the date of all files in the packages, in seconds since 1970: the commit's, or ``SOURCE_DATE_EPOCH``.

    Raises:
        Failure: `root` is no git checkout, or the variable has no number.
    """
    if given := environ.get("SOURCE_DATE_EPOCH"):
        if not given.isdecimal():
            raise Failure(f"SOURCE_DATE_EPOCH is {given!r}; valid values: seconds since 1970, as in 1796052266")
        return int(given)
    return int(_git(root, "log", "-1", "--format=%ct"))


def _git(root: Path, *words: str) -> str:
    """The output of a git command."""
    done = subprocess.run(["git", "-C", str(root), *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"packages are built from a git checkout, and {root} is none: {done.stderr.strip()}")
    return done.stdout


def _export(root: Path, to: Path) -> None:
    """Copy the files that git does not ignore."""
    for name in _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        source = root / name
        if name and source.is_file():  # a file that was deleted is listed until that is committed
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, to / name)


def left_out(exported: Path, sdist: Path) -> list[str]:
    """The files of a folder that an sdist of it lacks, by name."""
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers()}
    files = (path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file())
    return sorted(name for name in files if name not in packed)


def repack(sdist: Path, to: Path, seconds: int) -> None:
    """Write a ``.tar.gz`` anew: sorted, of one date, without the builder's name, and with modes 644 or 755.

    Args:
        sdist: the archive as a builder made it.
        to: the file to write.
        seconds: the date of all files, since 1970.
    """
    with (
        tarfile.open(sdist) as old,
        to.open("wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, seconds) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            plain = member.replace(mtime=seconds, mode=mode, uid=0, gid=0, uname="", gname="", deep=False)
            plain.pax_headers = {}
            new.addfile(plain, old.extractfile(member) if member.isfile() else None)


def machines(here: str) -> list[str]:
    """Return the processors for which a machine builds manylinux wheels, of `MACHINES`.

    Args:
        here: the machine's own, as `platform.machine()` names it.
    """
    return [each for each in MACHINES if each != "x86_64" or here == each]


def compiler(words: Sequence[str], zig: Sequence[str], machine: str) -> list[str]:
    """Return the command that compiles or links, for the arguments that setuptools gives to a compiler.

    Args:
        words: the arguments.
        zig: the command of ``zig cc``.
        machine: the processor, of `MACHINES`.
    """
    if machine == "x86_64" and any("zcactor/native/" in word for word in words):
        return ["gcc", *words]
    return [*zig, "-target", "{}-linux-gnu.{}.{}".format(machine, *GLIBC), *words]


def interpreter(version: str) -> str | None:
    """Return the path of the newest interpreter of a version that is here.

    Args:
        version: as in ``"3.12"``.

    Returns:
        This one, or pyenv's, or the path's; None where there is none.
    """
    if version == "{}.{}".format(*sys.version_info):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [path for path in pyenv.glob(f"{version}.*") if path.name.rpartition(".")[2].isdecimal()]
    newest = sorted(found, key=lambda path: int(path.name.rpartition(".")[2]))[-1:]
    for python in [*(str(path / "bin" / "python") for path in newest), shutil.which(f"python{version}")]:
        # A shim of pyenv ends with an error where its version is not chosen.
        if python and subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode == 0:
            return python
    return None


def _run(words: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """Run a command, and return its output.

    Raises:
        Failure: it fails. The message has the output.
    """
    done = subprocess.run(
        words, check=False, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    if done.returncode:
        raise Failure(f"{done.stdout}\n{shlex.join(words)} failed, with status {done.returncode}")
    return done.stdout


def _environment(folder: Path, python: str, group: str) -> str:
    """The interpreter of a virtual environment that has a dependency group."""
    inside = folder / "bin" / "python"
    if not inside.exists():
        _run([python, "-m", "venv", "--without-pip", "--clear", str(folder)])
    pip = [sys.executable, "-m", "pip", "--python", str(inside), "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", "--group", f"{ROOT / 'pyproject.toml'}:{group}"])
    return str(inside)


def _wheel(python: str, sources: Path, folder: Path, seconds: int, zig: str | None, machine: str) -> Path:
    """Build one wheel by the environment of an interpreter, with that of `zig` a manylinux one for a processor."""
    cc = shlex.join([sys.executable, "-I", str(Path(__file__).resolve()), "--compile", machine, zig]) if zig else "gcc"
    suffix = _run([python, "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"]).strip()
    # Flags in place of the interpreter's own: pyenv's put the folder where it was built into a RUNPATH.
    environ = {key: value for key, value in os.environ.items() if key not in ("CPPFLAGS", "PYTHONPATH")} | {
        "CC": cc, "LDSHARED": f"{cc} -shared", "CFLAGS": "-DNDEBUG -fwrapv -g0", "LDFLAGS": "-s",
        "SETUPTOOLS_EXT_SUFFIX": suffix.replace(platform.machine(), machine), "SOURCE_DATE_EPOCH": str(seconds),
        "ZIG_GLOBAL_CACHE_DIR": str(ROOT / "build" / "zig"), "ZIG_LOCAL_CACHE_DIR": str(ROOT / "build" / "zig"),
    }  # fmt: skip
    tag = "manylinux_{}_{}_{}".format(*GLIBC, machine)
    options = [f"--config-setting=--build-option=--plat-name={tag}"] if zig else []
    # Setuptools takes along all that is in this folder.
    info = sources / "zcactor.egg-info"
    bill = info / "sboms" / "zcactor.cdx.json"
    _run([python, "-I", str(ROOT / "tools" / "sbom.py"), str(info / "PKG-INFO"), str(bill)], environ)
    with tempfile.TemporaryDirectory() as made:
        words = [python, "-m", "build", "--wheel", "--no-isolation", "--outdir", made, *options, str(sources)]
        _run(words, environ)
        (wheel,) = Path(made).glob("*.whl")
        if zig:
            said = " ".join(_run([zig, "-m", "auditwheel", "show", str(wheel)]).split())
            granted = re.search(rf'platform tag: "manylinux_(\d+)_(\d+)_{machine}"', said)
            if granted is None or (int(granted[1]), int(granted[2])) > GLIBC:
                raise Failure(f"{wheel.name} is not a {tag} wheel; auditwheel says: {said}")
        return Path(shutil.move(wheel, folder / wheel.name))


def build(pythons: Sequence[str], manylinux: bool) -> list[Path]:
    """Build the sdist and the wheels.

    Args:
        pythons: interpreters, by path or name.
        manylinux: whether wheels are to work from glibc 2.28 on.

    Raises:
        Failure: there is no git checkout, or a builder fails.
    """
    seconds, folder, made = epoch(ROOT, os.environ), ROOT / "dist", ROOT / "build" / "dist"
    os.umask(0o022)
    zig = _environment(made / "wheels", sys.executable, "wheels") if manylinux else None
    builders = [
        _environment(made / Path(_run([python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]).strip()),
                     python, "dist")
        for python in pythons
    ]  # fmt: skip
    folder.mkdir(exist_ok=True)
    for old in folder.glob("zcactor-*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as temporary:
        exported, built = Path(temporary) / "exported", Path(temporary) / "built"
        _export(ROOT, exported)
        _run([builders[0], "-m", "build", "--sdist", "--no-isolation", "--outdir", str(built), str(exported)])
        (sdist,) = built.glob("*.tar.gz")
        if missing := left_out(exported, sdist):
            raise Failure(f"MANIFEST.in leaves out {', '.join(missing)}")
        packages = [folder / sdist.name]
        repack(sdist, packages[0], seconds)
        here = platform.machine()
        for number, (python, machine) in enumerate(product(builders, machines(here) if zig else [here])):
            sources = Path(temporary) / str(number)
            with tarfile.open(packages[0]) as archive:
                archive.extractall(sources, filter="data")
            (inside,) = sources.iterdir()
            packages.append(_wheel(python, inside, folder, seconds, zig, machine))
    return packages


def main(words: list[str]) -> int:
    """Build; print a line for each package. Returns the exit status."""
    if words[:1] == ["--compile"]:
        machine, zig, *given = words[1:]
        return subprocess.run(compiler(given, [zig, "-m", "ziglang", "cc"], machine), check=False).returncode
    parser = argparse.ArgumentParser(description="Build the packages into dist/.")
    parser.add_argument("--manylinux", nargs="+", default=[], metavar="VERSION", help="make manylinux wheels, by zig")
    versions = parser.parse_args(words).manylinux
    here = {version: interpreter(version) for version in versions}
    for version, python in here.items():
        if python is None:
            print(f"dist: Python {version} is neither pyenv's nor on the path: it gets no wheel", file=sys.stderr)
    for machine in MACHINES if versions else ():
        if machine not in machines(platform.machine()):
            print(f"dist: wheels for {machine} are built on it alone: none is built here", file=sys.stderr)
    pythons = [python for python in here.values() if python] if versions else [sys.executable]
    if not pythons:
        return 1
    try:
        for package in build(pythons, manylinux=bool(versions)):
            print(f"dist/{package.name}: {package.stat().st_size / 1e6:.2f} MB")
    except Failure as failure:
        print(f"dist: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
