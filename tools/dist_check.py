"""Check the packages in ``dist/``: their contents, and each wheel installed and run as by a user without a compiler.

::

    python tools/dist_check.py [--contents]     # --contents: nothing is installed

Contents: the package with its typing marker, licence, generated modules and stripped native parts for the Python and
the processor in its name, without tests, sources in C, the builder's folders or a RUNPATH. Each file has the bytes that
RECORD gives. The bill of materials names the version and the dependencies of the metadata. The sdist has what its tests
need.

Then each wheel for this machine goes into an empty environment of its Python, as pyenv or the path have it, with
``CC=/bin/false`` and no checkout on the path. There the README's program runs: in a site-packages that cannot be
written to, from an empty folder, and beside a checkout that was not built. The command line works, or says which extra
it needs. Then the ways of `tools/minutes.py` run: typed into IPython, under pytest, behind FastAPI, as a notebook. The
names of each extra can be resolved. Each failure is a line, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import base64
import csv
import ctypes
import hashlib
import json
import os
import platform
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from typing import TYPE_CHECKING, Final

if __name__ == "__main__":  # a script's path begins with its own folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.dist import MACHINES, ROOT, interpreter
from tools.minutes import PACKAGES, PATIENCE, block, ways

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from email.message import Message

__all__ = ["main", "native_faults", "sdist_faults", "wheel_faults"]

LARGEST: Final = 2_000_000
"""Bytes of a wheel, packed."""
EXTRAS: Final = frozenset(
    {"all", "cli", "cluster", "etcd", "gpu", "ray", "rdma", "slurm", "testing", "topology"}
)  # fmt: skip
PARTS: Final = ("zcactor/device/_torch", "zcactor/native/_hot", "zcactor/objectstore/heap/_heap")
"""The native parts, without the suffix of an interpreter."""
NEEDED: Final = (
    "zcactor/__init__.py",
    "zcactor/py.typed",
    "zcactor/rpc/_fbs/__init__.py",
    *(f"{n}.pyi" for n in PARTS),
)
SOURCES: Final = (
    "CHANGELOG.md", "LICENSE", "Makefile", "README.md", "benchmarks/__main__.py", "docs/index.md",
    "examples/quickstart.py", "pyproject.toml", "schemas/zcactor.fbs", "setup.py", "simulation/__main__.py",
    "tests/conftest.py", "tools/dist.py", "zcactor/device/_torch.c", "zcactor/native/hot.h", "zcactor/native/module.c",
    "zcactor/objectstore/heap/heap.h",
)  # fmt: skip
"""Files that stand for what an sdist needs: each folder of the repository has one."""
_SHARED_OBJECT, _DYNAMIC, _RPATH, _RUNPATH = 3, 6, 15, 29  # elf(5)
_ELF_MACHINES: Final = {"x86_64": 62, "aarch64": 183}  # elf(5), by `platform.machine()`
_DROP_FROM_BOUNDING_SET, _OVERRIDE_MODES = 24, 1  # prctl(2), capabilities(7)
_AS_USERS: Final = {"CC": "/bin/false", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _builders_folders() -> list[str]:
    """Folders of this machine whose names no package may have in it."""
    return sorted({str(ROOT), str(Path.home()), sys.prefix, sys.base_prefix, tempfile.gettempdir()} - {"/", "/usr"})


def native_faults(name: str, content: bytes, folders: Sequence[str], machine: str) -> Iterator[str]:
    """The faults of one native part: no shared object for its processor, not stripped, with a RUNPATH, or with folders
    of the builder.

    Args:
        name: its name for messages.
        content: its bytes.
        folders: names of folders that it may not have.
        machine: the processor, as `platform.machine()` names it.
    """
    expected = (_SHARED_OBJECT, _ELF_MACHINES[machine])
    if content[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<HH", content, 16) != expected:
        yield f"{name} is no shared object for {machine}"
        return
    (at,) = struct.unpack_from("<Q", content, 40)
    size, count, names = struct.unpack_from("<HHH", content, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, at + number * size) for number in range(count)]
    texts = sections[names][4]
    for section in sections:
        start = texts + section[0]
        title = content[start : content.index(b"\0", start)].decode("ascii", "replace")
        if title == ".symtab" or title.startswith(".debug"):
            yield f"{name} is not stripped: it has a section {title}"
        if section[1] == _DYNAMIC:
            tags = {tag for tag, _ in struct.iter_unpack("<QQ", content[section[4] : section[4] + section[5]])}
            if tags & {_RPATH, _RUNPATH}:
                yield f"{name} has a RUNPATH of its builder"
    for folder in folders:
        if f"{folder}/".encode() in content:
            yield f"{name} names the builder's folder {folder}"


def _metadata_faults(metadata: Message) -> Iterator[str]:
    """The faults of the metadata of a wheel."""
    if metadata["License-Expression"] != "Apache-2.0":
        yield "METADATA has no licence expression"
    extras = set(metadata.get_all("Provides-Extra", []))
    if missing := EXTRAS - extras:
        yield f"METADATA lacks the extras {', '.join(sorted(missing))}"
    if superfluous := extras - EXTRAS:
        yield f"METADATA has extras that are no user's: {', '.join(sorted(superfluous))}"
    for url in metadata.get_all("Project-URL", []):
        if re.search(r"://[^/]*(example|localhost|invalid)", url):
            yield f"METADATA names a host that does not exist: {url}"


def _bill_faults(content: bytes, metadata: Message) -> Iterator[str]:
    """The faults of the bill of materials of a wheel: it is not CycloneDX's, or names other things than METADATA."""
    name = metadata["Name"]
    expected = {f"{name} {metadata['Version']}", "Apache-2.0"}
    expected |= {line for line in metadata.get_all("Requires-Dist", []) if not line.startswith(f"{name}[")}
    try:
        bill = json.loads(content)
        wheel, others = bill["metadata"]["component"], {each["bom-ref"]: each for each in bill["components"]}
        (needed,) = (each["dependsOn"] for each in bill["dependencies"] if each["ref"] == wheel["bom-ref"])
        named = {f"{wheel['name']} {wheel['version']}", *(each["expression"] for each in wheel["licenses"])}
        named |= {line["value"] for each in needed for line in others[each]["properties"]}
        if bill["bomFormat"] != "CycloneDX":
            raise ValueError(bill["bomFormat"])
    except (LookupError, TypeError, ValueError) as error:
        yield f"has a bill of materials that is not CycloneDX's: {error!r}"
        return
    if named != expected:
        yield f"has a bill of materials that differs from METADATA: {', '.join(sorted(named ^ expected))}"


def _version(wheel: Path) -> str:
    """The version of Python that a wheel is for, as in ``"3.12"``, by the wheel's name."""
    tag = wheel.name.split("-")[2]
    return f"{tag[2]}.{tag[3:]}"


def _machine(wheel: Path) -> str | None:
    """The processor that a wheel is for, of `MACHINES`, by the wheel's name."""
    return next((each for each in MACHINES if wheel.stem.endswith(f"_{each}")), None)


def wheel_faults(wheel: Path, folders: Sequence[str]) -> list[str]:
    """The faults in the contents of a wheel, each of them a line.

    Args:
        wheel: its file.
        folders: names of folders that its native parts may not have.
    """
    machine = _machine(wheel)
    if machine is None:
        return [f"is for none of the processors {', '.join(MACHINES)}"]
    faults = []
    if wheel.stat().st_size > LARGEST:
        faults.append(f"is {wheel.stat().st_size / 1e6:.2f} MB, more than {LARGEST / 1e6:.0f} MB")
    with zipfile.ZipFile(wheel) as packed:
        contents = {name: packed.read(name) for name in packed.namelist()}
    tops = {name.partition("/")[0] for name in contents}
    info = next((name for name in tops if name.endswith(".dist-info")), "zcactor.dist-info")
    faults += [f"has {top}, which is no part of the package" for top in sorted(tops - {"zcactor", info})]
    bill = f"{info}/sboms/zcactor.cdx.json"
    infos = (f"{info}/{name}" for name in ("METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE"))
    faults += [f"lacks {name}" for name in (*NEEDED, *infos, bill) if name not in contents]
    for name in contents:
        parts, suffix = name.split("/"), Path(name).suffix
        if parts[0] != "zcactor":
            continue
        if "tests" in parts or parts[-1].startswith(("test_", "conftest")):
            faults.append(f"has a test: {name}")
        elif suffix not in (".py", ".pyi", ".so") and parts[-1] != "py.typed":
            faults.append(f"has a file that no installed package needs: {name}")
    suffix = f".cpython-{_version(wheel).replace('.', '')}-{machine}-linux-gnu.so"
    for part in PARTS:
        found = [name for name in contents if name.startswith(f"{part}.") and name.endswith(".so")]
        if found != [f"{part}{suffix}"]:
            faults.append(f"needs {part}{suffix}, and has {', '.join(found) or 'nothing in its place'}")
        for name in found:
            faults += native_faults(name, contents[name], folders, machine)
    if f"{info}/METADATA" in contents:
        metadata = message_from_bytes(contents[f"{info}/METADATA"])
        faults += _metadata_faults(metadata)
        faults += _bill_faults(contents[bill], metadata) if bill in contents else ()
    faults += _record_faults(contents, f"{info}/RECORD")
    return faults


def _record_faults(contents: dict[str, bytes], record: str) -> Iterator[str]:
    """The files of a wheel whose bytes are not those of RECORD."""
    rows = {row[0]: row[1] for row in csv.reader(contents.get(record, b"").decode().splitlines())}
    for name, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if name != record and rows.get(name) != f"sha256={digest}":
            yield f"has other bytes in {name} than RECORD says"


def sdist_faults(sdist: Path) -> list[str]:
    """The faults in the contents of an sdist, each of them a line."""
    with tarfile.open(sdist) as packed:
        members = packed.getmembers()
    names = {member.name.partition("/")[2] for member in members}
    faults = [f"lacks {name}" for name in SOURCES if name not in names]
    faults += [f"has a built file: {name}" for name in sorted(names) if name.endswith((".so", ".pyc", ".o"))]
    if owners := {member.uname for member in members} - {""}:
        faults.append(f"names its builder: {', '.join(sorted(owners))}")
    return faults


def _obey_modes() -> None:
    """Have the modes of files hold for this process even where it is root's."""
    ctypes.CDLL(None).prctl(_DROP_FROM_BOUNDING_SET, _OVERRIDE_MODES, 0, 0, 0)


@dataclass(frozen=True)
class _Environment:
    """An empty environment with one wheel in it, and the folder in which programs run."""

    python: str
    home: Path

    def run(self, words: Sequence[str], *, cwd: Path | None = None, patience: float = 300.0) -> tuple[int, str]:
        """Run a command of this environment's Python; return its exit status and its output.

        Args:
            words: the arguments of the interpreter.
            cwd: the working directory, by default an empty folder.
            patience: seconds until it is ended.
        """
        environ = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL", "ZCACTOR"))
        }
        home = {} if words[:2] == ["-m", "pip"] else {"HOME": str(self.home)}  # pip has its settings and its cache
        try:
            done = subprocess.run(
                [self.python, *words], env=environ | _AS_USERS | home, cwd=cwd or self.home,
                check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=patience,
                preexec_fn=_obey_modes,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return -1, f"it had not ended after {patience:g} s"
        return done.returncode, done.stdout.strip()


def _checkout(sdist: Path, folder: Path) -> Path:
    """Unpack the sdist: a checkout that was not built."""
    with tarfile.open(sdist) as packed:
        packed.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


def _installed(wheel: Path, python: str, folder: Path) -> tuple[_Environment, str]:
    """Install a wheel into an empty environment; return that, and the fault: empty where there is none."""
    made = subprocess.run(
        [python, "-m", "venv", str(folder / "environment")], check=False, capture_output=True, text=True
    )
    home = folder / "home"
    home.mkdir()
    environment = _Environment(str(folder / "environment" / "bin" / "python"), home)
    if made.returncode:
        return environment, f"no environment can be made by {python}: {made.stdout}{made.stderr}"
    status, said = environment.run(["-m", "pip", "install", "--quiet", "--no-compile", str(wheel)])
    return environment, f"cannot be installed: {_last(said)}" if status else ""


def _last(text: str) -> str:
    """The last line of a command's output, which has the error."""
    return (text.splitlines() or ["(no output)"])[-1]


def _run_faults(environment: _Environment, checkout: Path) -> Iterator[str]:
    """The faults of an installed wheel, found by running programs as a user does."""
    written = environment.home / "program.py"
    written.write_text(block((ROOT / "README.md").read_text(), "zc.run("))
    expected = "with 0 bytes copied"
    (package,) = Path(environment.python).parents[1].glob("lib/python*/site-packages/zcactor")
    folders = [package.parent, package, *(path for path in package.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        status, said = environment.run([str(written)])
    finally:
        for folder in folders:
            folder.chmod(0o755)
    if status or expected not in said:
        yield f"the README's program does not print {expected!r} where nobody can write to the package: {_last(said)}"
    if list(package.rglob("__pycache__")):
        yield "was written to, so nothing is known about a package that cannot be"
    where = f"import zcactor, sys; sys.exit(zcactor.__file__ != {str(package / '__init__.py')!r})"
    status, said = environment.run(["-W", "error", "-c", where])
    if status:
        yield f"cannot be imported from site-packages: {_last(said)}"
        return
    for place, cwd in (("", None), (" beside a checkout", checkout)):
        status, said = environment.run([str(written)], cwd=cwd)
        if status or expected not in said:
            yield f"the README's program does not print {expected!r}{place}: {_last(said)}"
    status, said = environment.run(["-c", "import zcactor"], cwd=checkout)
    if not (status and "has no native parts for this Python" in _last(said)):
        yield f"a checkout that was not built, and hides it, does not say so: {_last(said)}"
    for words in (["doctor"], ["--help"]):
        status, said = environment.run(["-m", "zcactor", *words])
        if status and not (said.count("\n") == 0 and "pip install 'zcactor[cli]'" in said):
            yield f"zcactor {' '.join(words)} neither works nor says which extra it needs: {_last(said)}"
    status, said = environment.run(["-m", "zcactor", "demo", "--size", "16MiB"])
    if status or "is the fastest" not in said:
        yield f"zcactor demo does not compare: {_last(said)}"


def _command_line_faults(environment: _Environment, wheel: Path) -> Iterator[str]:
    """The faults of the command line, once its extra is installed."""
    status, said = environment.run(["-m", "pip", "install", "--quiet", "--no-compile", f"{wheel}[cli]"])
    if status:
        yield f"its extra cli cannot be installed: {_last(said)}"
        return
    for words in (["doctor"], ["--help"]):
        status, said = environment.run(["-m", "zcactor", *words])
        if status:
            yield f"zcactor {' '.join(words)} ends with status {status}: {_last(said)}"


def _minutes_faults(environment: _Environment, folder: Path) -> Iterator[str]:
    """The faults that a newcomer meets within the first ten minutes.

    Args:
        environment: the wheel's. The packages that the ways need are installed into it.
        folder: an empty one, where each way gets a folder.
    """
    status, said = environment.run(["-m", "pip", "install", "--quiet", "--no-compile", *PACKAGES])
    if status:
        yield f"cannot be tried as newcomers do, as {', '.join(PACKAGES)} cannot be installed: {_last(said)}"
        return
    for number, way in enumerate(ways(ROOT)):
        here = folder / str(number)
        here.mkdir(parents=True)
        for name, text in way.files.items():
            (here / name).write_text(text, "utf-8")
        status, said = environment.run(way.words, cwd=here, patience=PATIENCE)
        if status or way.expected not in said:
            yield f"{way.name}, the first program does not print {way.expected!r}: {_last(said)}"


def _extra_faults(environment: _Environment, wheel: Path) -> Iterator[str]:
    """The extras with names that cannot be resolved. One look at all of them is enough where it succeeds."""
    resolve = ["-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    if not environment.run([*resolve, f"{wheel}[{','.join(sorted(EXTRAS))}]"])[0]:
        return
    for extra in sorted(EXTRAS):
        status, said = environment.run([*resolve, f"{wheel}[{extra}]"])
        if status:
            yield f"its extra {extra} cannot be resolved: {_last(said)}"


def _install_faults(wheel: Path, sdist: Path) -> Iterator[str]:
    """The faults of a wheel that show when it is installed, in an empty environment of its Python."""
    version, here = _version(wheel), platform.machine()
    if _machine(wheel) != here:
        print(
            f"dist-check: {wheel.name} is not installed: it is for {_machine(wheel)}, and this machine is {here}",
            file=sys.stderr,
        )
        return
    python = interpreter(version)
    if python is None:
        print(f"dist-check: {wheel.name} is not installed: Python {version} is neither pyenv's nor on the path",
              file=sys.stderr)  # fmt: skip
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        environment, fault = _installed(wheel, python, folder)
        if fault:
            yield fault
            return
        yield from _run_faults(environment, _checkout(sdist, folder / "sources"))
        yield from _command_line_faults(environment, wheel)
        yield from _minutes_faults(environment, folder / "minutes")
        yield from _extra_faults(environment, wheel)


def main(words: list[str], folder: Path = ROOT / "dist") -> int:
    """Check each package; print a line for each fault, and one for each package without any. Returns the exit status.

    Args:
        words: the arguments.
        folder: where the packages are.
    """
    parser = argparse.ArgumentParser(description="Check the packages in dist/.")
    parser.add_argument("--contents", action="store_true", help="install nothing")
    contents_alone = parser.parse_args(words).contents
    sdists, wheels = sorted(folder.glob("*.tar.gz")), sorted(folder.glob("*.whl"))
    if len(sdists) != 1 or not wheels:
        print(f"dist-check: {folder} has {len(sdists)} sdists and {len(wheels)} wheels; run make dist", file=sys.stderr)
        return 1
    bad = False
    for package in [*sdists, *wheels]:
        faults = sdist_faults(package) if package in sdists else wheel_faults(package, _builders_folders())
        if not contents_alone and not faults and package in wheels:
            faults = list(_install_faults(package, sdists[0]))
        for fault in faults:
            print(f"dist-check: {package.name} {fault}", file=sys.stderr)
        if not faults:
            print(f"{package.name}: all is well")
        bad = bad or bool(faults)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
