"""The native part: the path of calls with plain arguments, in C."""

from __future__ import annotations

import importlib
import sys
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
    hot = importlib.import_module("zcactor.native._hot")

hot.setup(bytes(52), ProtocolError, ConnectionLost, None, None)  # zcactor.rpc.session sets the rest
