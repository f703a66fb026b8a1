"""The native part: the path of calls with plain arguments, in C."""

from __future__ import annotations

import importlib
from typing import Any

from zcactor.errors import ConnectionLost, ProtocolError

__all__ = ["hot"]

hot: Any = importlib.import_module("zcactor.native._hot")
"""The extension module."""

hot.setup(bytes(52), ProtocolError, ConnectionLost, None, None)  # zcactor.rpc.session sets the rest
