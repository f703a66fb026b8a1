"""The native parts. Everything else stands in pyproject.toml."""

import subprocess
import sys
import tempfile
from glob import glob
from pathlib import Path
from shutil import which

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

_VERSION = "{}.{}".format(*sys.version_info)

# Most of what the extensions do is to call the interpreter: -fno-plt spares each such call a jump.
_FLAGS = [
    "-O2", "-fno-plt", "-fno-semantic-interposition", "-std=gnu11",
    "-Wall", "-Wextra", "-Wno-missing-field-initializers",
]  # fmt: skip
_ALLOCATOR = ["blocks", "extents", "forks", "ids", "mapping", "pins"]
_HOT = [
    "module", "credits", "counters", "records", "send_buffer", "msgpack_plain", "wire", "frame_write", "frame_read",
    "pushing", "reader", "fold", "copying", "receiving", "arrays", "seat", "lane",
]  # fmt: skip


class _Build(build_ext):
    """The building of the native parts, or one sentence that says what is missing for it."""

    def build_extensions(self) -> None:
        """Look for a compiler and for the headers of Python and NumPy, then build.

        Raises:
            PlatformError: one of them is missing or does not work.
        """
        needs = "zcactor is built from its sources here, and that needs "
        if int(numpy.__version__.partition(".")[0]) < 2:
            raise PlatformError(
                f"{needs}the headers of NumPy 2, and {numpy.__version__} is here: pip install 'numpy>=2'"
            )
        command = list(self.compiler.compiler_so)
        if which(command[0]) is None:
            raise PlatformError(f"{needs}a C compiler, and {command[0]} is not found: apt install gcc libc6-dev")
        if not any((Path(folder) / "Python.h").is_file() for folder in self.compiler.include_dirs):
            raise PlatformError(
                f"{needs}Python's headers, and Python.h is in none of {', '.join(self.compiler.include_dirs)}: "
                f"apt install python{_VERSION}-dev"
            )
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "smallest.c"
            source.write_text('#include <stdio.h>\nint main(void) { return puts("") < 0; }\n')
            done = subprocess.run(
                [*command, "-c", str(source), "-o", str(source.with_suffix(".o"))],
                check=False, capture_output=True, text=True, errors="replace",
            )  # fmt: skip
        if done.returncode:
            said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
            raise PlatformError(
                f"{needs}a C compiler that works, and {command[0]} does not compile the smallest program ({said}): "
                "apt install gcc libc6-dev, and set CC to no other compiler"
            )
        super().build_extensions()


if sys.platform != "linux":
    sys.exit(f"zcactor runs on Linux, and this is {sys.platform}: on Windows use WSL2, elsewhere a container")

setup(
    cmdclass={"build_ext": _Build},
    ext_modules=[
        Extension(
            "zcactor.objectstore.heap._heap",
            sorted(glob("zcactor/objectstore/heap/*.c")),
            include_dirs=[numpy.get_include()],
            depends=[*sorted(glob("zcactor/objectstore/heap/*.h")), "zcactor/native/_living.h"],
            extra_compile_args=[*_FLAGS, "-pthread"],
            extra_link_args=["-pthread"],
        ),
        Extension(
            "zcactor.device._torch",
            ["zcactor/device/_torch.c", *[f"zcactor/objectstore/heap/{name}.c" for name in _ALLOCATOR]],
            depends=sorted(glob("zcactor/objectstore/heap/*.h")),
            extra_compile_args=[*_FLAGS, "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
        ),
        Extension(
            "zcactor.native._hot",
            [f"zcactor/native/{name}.c" for name in _HOT],
            depends=["zcactor/native/hot.h", "zcactor/native/_living.h"],
            include_dirs=[numpy.get_include()],
            # A fused multiply-add rounds once where NumPy rounds twice.
            extra_compile_args=[*_FLAGS, "-fvisibility=hidden", "-ffp-contract=off"],
        ),
    ],
)
