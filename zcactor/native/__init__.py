"""The optional native part: what a call with plain arguments passes through, in C.

`hot` is the extension module, or None where it was not built or ``ZCACTOR_NATIVE=0`` switches it off; everything works
without it, a call then takes about twice as long.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from zcactor.errors import ConnectionLost, ProtocolError

__all__ = ["hot"]


def _load() -> Any:
    if os.environ.get("ZCACTOR_NATIVE", "1") == "0":
        return None
    try:
        return importlib.import_module("zcactor.native._hot")
    except ModuleNotFoundError:  # no compiler when it was installed
        return None


hot: Any = _load()
"""The module ``_hot``, or None."""

if hot is not None:
    hot.setup(bytes(52), ProtocolError, ConnectionLost, None, None)  # the rest comes with zcactor.rpc.session
