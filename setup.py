"""The native parts. Everything else stands in pyproject.toml."""

import numpy
from setuptools import Extension, setup

# Most of what the extensions do is to call the interpreter: -fno-plt spares each such call a jump.
_FLAGS = [
    "-O2", "-fno-plt", "-fno-semantic-interposition", "-std=gnu11",
    "-Wall", "-Wextra", "-Wno-missing-field-initializers",
]  # fmt: skip

setup(
    ext_modules=[
        Extension(
            "zcactor.objectstore._heap",
            ["zcactor/objectstore/_heap.c"],
            include_dirs=[numpy.get_include()],
            depends=["zcactor/objectstore/_heap.h", "zcactor/native/_living.h"],
            extra_compile_args=[*_FLAGS, "-pthread"],
            extra_link_args=["-pthread"],
        ),
        Extension(
            "zcactor.native._hot",
            ["zcactor/native/_hot.c"],
            depends=["zcactor/native/_living.h"],
            include_dirs=[numpy.get_include()],
            extra_compile_args=_FLAGS,
            optional=True,  # without a compiler the Python path does the same, slower
        ),
    ]
)
