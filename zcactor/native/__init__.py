"""The native part: the path of calls with plain arguments, in C."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zcactor.errors import ConnectionLost, ProtocolError

__all__ = ["hot"]

if sys.byteorder != "little":
    raise ImportError(
        f"zcactor needs a little-endian machine, and this one is {sys.byteorder}-endian: frames are little-endian, and "
        "are written and read in place; use x86-64 or arm64"
    )

if TYPE_CHECKING:
    from zcactor.native import _hot as hot
else:
    try:
        hot = importlib.import_module("zcactor.native._hot")
    except ModuleNotFoundError as error:
        if error.name != "zcactor.native._hot":
            raise
        raise ImportError(
            f"{Path(__file__).parents[1]} has no native parts for this Python ({sys.implementation.cache_tag}): where "
            "it is a checkout, run pip install -e . in the folder above, or start the program from another folder, so "
            "that the installed package is found; otherwise run pip install --force-reinstall zcactor"
        ) from error

hot.setup(bytes(52), ProtocolError, ConnectionLost, None, None)  # zcactor.rpc.session sets the rest
