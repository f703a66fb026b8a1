"""Machines that cannot run zcactor are refused at the start, and not by wrong bytes later."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OWN = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


SETUP = Path(__file__).resolve().parents[2] / "setup.py"


def test_another_system_is_refused_at_the_import() -> None:
    program = "import sys; sys.platform = 'win32'; import zcactor"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: zcactor runs on Linux, and this is win32: on Windows use WSL2")


def test_a_checkout_that_is_not_built_says_so(tmp_path: Path) -> None:
    built = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(SETUP.parent / "zcactor", tmp_path / "zcactor", ignore=built)
    words = [sys.executable, "-c", "import zcactor"]
    done = subprocess.run(words, cwd=tmp_path, env=OWN, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path / 'zcactor'} has no native parts for this Python")
    assert "pip install -e . in the folder above" in last


@pytest.mark.parametrize(
    ("environ", "before", "sentence"),
    [
        (
            {},
            "import numpy, sysconfig; sysconfig.get_config_vars(); sys.platform = 'darwin'",
            "zcactor runs on Linux, and this is darwin: on Windows use WSL2",
        ),
        (
            {},
            "import numpy; numpy.__version__ = '1.26.4'",
            "needs the headers of NumPy 2, and 1.26.4 is here: pip install",
        ),
        ({"CC": "/no/compiler"}, "", "needs a C compiler, and /no/compiler is not found: apt install gcc libc6-dev"),
        ({"CC": "/bin/false"}, "", "and /bin/false does not compile the smallest program (exit status 1): apt install"),
        (
            {"CC": "cc"},
            "import distutils.sysconfig as s; s.get_python_inc = lambda *_, **__: '/no/headers'",
            ", /no/headers: apt install python",
        ),
    ],
    ids=["system", "NumPy 1", "no compiler", "broken compiler", "no headers"],
)
def test_a_build_from_sources_says_what_is_missing(
    tmp_path: Path, environ: dict[str, str], before: str, sentence: str
) -> None:
    program = f"import setuptools, sys\n{before}\nsys.argv[1:] = ['build_ext']\n" + SETUP.read_text()
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=tmp_path, env=OWN | environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert sentence in last


def test_a_big_endian_machine_is_refused_at_the_import() -> None:
    program = "import sys; sys.byteorder = 'big'; import zcactor"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ImportError: zcactor needs a little-endian machine, and this one is big-endian" in done.stderr
