"""Loading: files are read straight into the store, so reading makes no copy, and neither does passing the array."""

from __future__ import annotations

from zcactor.loading.files import load

__all__ = ["load"]
