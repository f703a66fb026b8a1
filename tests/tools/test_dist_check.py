"""`tools/dist_check.py`: a package as it has to be passes, and each fault is one line."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import platform
import re
import struct
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tools.dist_check import EXTRAS, LARGEST, NEEDED, PARTS, SOURCES, main, native_faults, wheel_faults

FOLDER = "/home/builder"
INFO = "zcactor-1.dist-info"
BILL = f"{INFO}/sboms/zcactor.cdx.json"
METADATA = (
    "Name: zcactor\nVersion: 1\nLicense-Expression: Apache-2.0\nRequires-Dist: numpy>=2.0\n"
    'Requires-Dist: rich>=13; extra == "cli"\nRequires-Dist: zcactor[cli]; extra == "all"\n'
) + "".join(f"Provides-Extra: {extra}\n" for extra in sorted(EXTRAS))
PROGRAM, DYNAMIC, RUNPATH = 1, 6, 29


def shared_object(
    *, machine: int = 62, sections: Sequence[str] = (".text",), tags: Sequence[int] = (), data: bytes = b""
) -> bytes:
    """The file of a shared object: a header, the names of its sections, its dynamic tags, bytes, and its sections."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".dynamic", ".shstrtab"))
    dynamic = b"".join(struct.pack("<QQ", tag, 0) for tag in (*tags, 0))
    texts, table = 64 + len(dynamic), 64 + len(dynamic) + len(names) + len(data)
    places = [(PROGRAM, 64, 0)] * len(sections) + [(DYNAMIC, 64, len(dynamic)), (3, texts, len(names))]
    titles = [names.index(name.encode() + b"\0") for name in (*sections, ".dynamic", ".shstrtab")]
    rows = [
        struct.pack("<IIQQQQIIQQ", title, kind, 0, 0, at, size, 0, 0, 1, 0)
        for title, (kind, at, size) in zip(titles, places, strict=True)
    ]
    numbers = (3, machine, 1, 0, 0, table, 0, 64, 0, 0, 64, len(rows), len(rows) - 1)
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", *numbers)
    return header + dynamic + names + data + b"".join(rows)


def bill(version: str = "1", numpy: str = "numpy>=2.0", made_by: str = "CycloneDX") -> bytes:
    """A bill of materials as `tools/sbom.py` writes it."""
    lines = {"numpy": numpy, "rich": 'rich>=13; extra == "cli"'}
    wheel = {"bom-ref": "a", "name": "zcactor", "version": version, "licenses": [{"expression": "Apache-2.0"}]}
    return json.dumps({
        "bomFormat": made_by, "metadata": {"component": wheel}, "dependencies": [{"ref": "a", "dependsOn": [*lines]}],
        "components": [{"bom-ref": name, "properties": [{"value": line}]} for name, line in lines.items()],
    }).encode()  # fmt: skip


def contents(machine: str = "x86_64", elf: int = 62) -> dict[str, bytes]:
    """The files of a wheel without a fault."""
    files = dict.fromkeys(NEEDED, b"")
    files |= {f"{part}.cpython-311-{machine}-linux-gnu.so": shared_object(machine=elf) for part in PARTS}
    return files | {
        f"{INFO}/METADATA": METADATA.encode(), f"{INFO}/entry_points.txt": b"", f"{INFO}/licenses/LICENSE": b"",
        BILL: bill(),
    }  # fmt: skip


def wheel(folder: Path, files: Mapping[str, bytes], wrong: str = "", machine: str = "x86_64") -> Path:
    """A wheel of these files, and a RECORD that is right but for the file `wrong`."""
    made = folder / f"zcactor-1-cp311-cp311-manylinux_2_28_{machine}.whl"
    rows = []
    for name, content in files.items():
        digest = hashlib.sha256(content + (b"other" if name == wrong else b"")).digest()
        rows.append(f"{name},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},{len(content)}\n")
    with zipfile.ZipFile(made, "w") as packed:
        for name, content in {**files, f"{INFO}/RECORD": "".join(rows).encode()}.items():
            packed.writestr(name, content)
    return made


def sdist(folder: Path, names: Sequence[str], owner: str = "") -> None:
    with tarfile.open(folder / "zcactor-1.tar.gz", "w:gz") as packed:
        for name in names:
            member = tarfile.TarInfo(f"zcactor-1/{name}")
            member.uname = owner
            packed.addfile(member, io.BytesIO())


def test_packages_without_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel(tmp_path, contents())
    sdist(tmp_path, SOURCES)
    assert main(["--contents"], tmp_path) == 0
    out, err = capsys.readouterr()
    assert [line.partition(": ")[2] for line in out.splitlines()] == ["all is well", "all is well"]
    assert err == ""


def test_a_wheel_for_another_processor_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    made = wheel(tmp_path, contents("aarch64", 183), machine="aarch64")
    sdist(tmp_path, SOURCES)
    assert main([], tmp_path) == 0
    out, err = capsys.readouterr()
    assert f"{made.name}: all is well" in out
    assert err == f"dist-check: {made.name} is not installed: it is for aarch64, and this machine is x86_64\n"


def test_a_wheel_with_the_parts_of_another_processor(tmp_path: Path) -> None:
    faults = wheel_faults(wheel(tmp_path, contents(), machine="aarch64"), [])
    assert faults == [
        said for part in PARTS for said in (
            f"needs {part}.cpython-311-aarch64-linux-gnu.so, and has {part}.cpython-311-x86_64-linux-gnu.so",
            f"{part}.cpython-311-x86_64-linux-gnu.so is no shared object for aarch64",
        )
    ]  # fmt: skip
    assert wheel_faults(wheel(tmp_path, contents(), machine="riscv64"), []) == [
        "is for none of the processors x86_64, aarch64"
    ]


HOT = f"{PARTS[1]}.cpython-311-x86_64-linux-gnu.so"


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"tests/test_api.py": b""}, "has tests, which is no part of the package"),
        ({"simulation/__init__.py": b""}, "has simulation, which is no part of the package"),
        ({"zcactor/api/test_api.py": b""}, "has a test: zcactor/api/test_api.py"),
        ({"zcactor/native/wire.c": b""}, "has a file that no installed package needs: zcactor/native/wire.c"),
        ({"zcactor/py.typed": None}, "lacks zcactor/py.typed"),
        ({"zcactor/rpc/_fbs/__init__.py": None}, "lacks zcactor/rpc/_fbs/__init__.py"),
        ({f"{INFO}/licenses/LICENSE": None}, f"lacks {INFO}/licenses/LICENSE"),
        ({BILL: None}, f"lacks {BILL}"),
        ({BILL: b"{}"}, "has a bill of materials that is not CycloneDX's: KeyError('metadata')"),
        ({BILL: bill(made_by="SPDX")}, "has a bill of materials that is not CycloneDX's: ValueError('SPDX')"),
        ({BILL: bill("2")}, "has a bill of materials that differs from METADATA: zcactor 1, zcactor 2"),
        ({BILL: bill(numpy="numpy")}, "has a bill of materials that differs from METADATA: numpy, numpy>=2.0"),
        ({HOT: None}, f"needs {HOT}, and has nothing in its place"),
        ({HOT: shared_object(machine=183)}, f"{HOT} is no shared object for x86_64"),
        ({HOT: b"not built"}, f"{HOT} is no shared object for x86_64"),
        ({HOT: shared_object(sections=[".symtab"])}, f"{HOT} is not stripped: it has a section .symtab"),
        ({HOT: shared_object(sections=[".debug_info"])}, f"{HOT} is not stripped: it has a section .debug_info"),
        ({HOT: shared_object(tags=[1, RUNPATH])}, f"{HOT} has a RUNPATH of its builder"),
        ({HOT: shared_object(data=b"/home/builder/x.h")}, f"{HOT} names the builder's folder {FOLDER}"),
        (
            {f"{INFO}/METADATA": METADATA.replace("License-Expression: Apache-2.0\n", "").encode()},
            "METADATA has no licence expression",
        ),
        (
            {f"{INFO}/METADATA": METADATA.replace("Provides-Extra: rdma\n", "").encode()},
            "METADATA lacks the extras rdma",
        ),
        (
            {f"{INFO}/METADATA": f"{METADATA}Provides-Extra: docs\n".encode()},
            "METADATA has extras that are no user's: docs",
        ),
        (
            {f"{INFO}/METADATA": f"{METADATA}Project-URL: Home, https://zcactor.example/x\n".encode()},
            "METADATA names a host that does not exist: Home, https://zcactor.example/x",
        ),
    ],
)
def test_each_fault_of_a_wheel_is_one_line(tmp_path: Path, changed: dict[str, bytes | None], fault: str) -> None:
    files = {name: content for name, content in {**contents(), **changed}.items() if content is not None}
    faults = wheel_faults(wheel(tmp_path, files), [FOLDER])
    assert faults == [fault]


def test_a_large_wheel(tmp_path: Path) -> None:
    (fault,) = wheel_faults(wheel(tmp_path, contents() | {"zcactor/large.py": bytes(LARGEST)}), [])
    assert re.fullmatch(r"is 2\.\d+ MB, more than 2 MB", fault)


def test_a_file_that_was_changed_after_the_build(tmp_path: Path) -> None:
    changed = wheel(tmp_path, contents(), wrong="zcactor/__init__.py")
    assert wheel_faults(changed, []) == ["has other bytes in zcactor/__init__.py than RECORD says"]


def test_the_names_of_other_folders_are_no_fault() -> None:
    assert list(native_faults("a.so", shared_object(data=b"/home/builders"), [FOLDER], "x86_64")) == []


@pytest.mark.parametrize(
    ("names", "owner", "fault"),
    [
        (SOURCES[1:], "", f"lacks {SOURCES[0]}"),
        ([*SOURCES, "zcactor/_hot.so"], "", "has a built file: zcactor/_hot.so"),
        (SOURCES, "somebody", "names its builder: somebody"),
    ],
)
def test_each_fault_of_an_sdist_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], owner: str, fault: str
) -> None:
    wheel(tmp_path, contents())
    sdist(tmp_path, names, owner)
    assert main(["--contents"], tmp_path) == 1
    assert capsys.readouterr().err == f"dist-check: zcactor-1.tar.gz {fault}\n"


def test_a_folder_without_packages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], tmp_path) == 1
    assert capsys.readouterr().err == f"dist-check: {tmp_path} has 0 sdists and 0 wheels; run make dist\n"
