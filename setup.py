"""The native part. Everything else stands in pyproject.toml."""

import numpy
from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "zcactor.native._hot",
            ["zcactor/native/_hot.c"],
            include_dirs=[numpy.get_include()],
            extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Wno-missing-field-initializers"],
            optional=True,  # without a compiler the Python path does the same, slower
        )
    ]
)
