"""The import of networkx, which the extra ``topology`` installs."""

from __future__ import annotations

from typing import Any

__all__ = ["networkx"]


def networkx() -> Any:
    """The module networkx.

    Raises:
        ImportError: it is not installed. The message names the extra.
    """
    try:
        import networkx
    except ImportError as error:
        raise ImportError("topologies need networkx: pip install 'zcactor[topology]'", name="networkx") from error
    return networkx
