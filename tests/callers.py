"""Remote methods as a peer calls them."""

from __future__ import annotations

from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

from zcactor.rpc.services import current_call


async def asked_by(session: Any, call: Coroutine[Any, Any, Any]) -> Any:
    """Run `call` as a call of the peer of `session`."""
    token = current_call.set(SimpleNamespace(session=session))
    try:
        return await call
    finally:
        current_call.reset(token)
