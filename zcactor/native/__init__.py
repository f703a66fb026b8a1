"""The optional native part: what a call with plain arguments passes through, in C.

`hot` is the extension module, or None where it was not built or ``ZCACTOR_NATIVE=0`` switches it off; everything works
without it, a call then takes about twice as long.
"""

from __future__ import annotations

import os
from typing import Any

from zcactor.errors import ConnectionLost, ProtocolError

__all__ = ["hot"]

hot: Any = None
"""The module ``_hot``, or None."""

if os.environ.get("ZCACTOR_NATIVE", "1") != "0":
    try:
        from zcactor.native import _hot as hot
    except ImportError:  # no compiler when it was installed
        hot = None
    else:
        hot.setup(bytes(52), ProtocolError, ConnectionLost)  # the template comes with zcactor.rpc.session
