"""The native parts. Everything else stands in pyproject.toml."""

from glob import glob

import numpy
from setuptools import Extension, setup

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

setup(
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
    ]
)
