"""Load the native parts that were built with sanitizers, in every interpreter that has this folder on its path.

At the end of the interpreter the objects of the native parts are counted: an object that is alive then is never freed.
"""

import atexit
import gc
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

NAMES = ("zcactor.native._hot", "zcactor.objectstore.heap._heap")
FOLDER = Path(os.environ["ZCACTOR_SANITIZED"])


class Sanitized:
    """The finder of the two modules in the folder of the build."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name not in NAMES:
            return None
        file = FOLDER / f"{name.replace('.', '/')}{sysconfig.get_config_var('EXT_SUFFIX')}"
        return importlib.util.spec_from_file_location(name, file)


def count() -> None:
    """End with status 98 when an object of the native parts is alive."""
    gc.unfreeze()  # tests/conftest.py freezes the objects that it finds alive after a module
    for _ in range(3):
        gc.collect()
    living = {name: sys.modules[name].living() for name in NAMES if name in sys.modules}
    if any(living.values()):
        print(f"objects that are never freed: {living}", file=sys.stderr, flush=True)
        os._exit(98)


sys.meta_path.insert(0, Sanitized)
if "ZCACTOR_SANITIZED_COUNTS" in os.environ:  # only in the interpreter that was asked to count
    del os.environ["ZCACTOR_SANITIZED_COUNTS"]
    atexit.register(count)
