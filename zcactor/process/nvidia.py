"""Whether a process may have GPUs at all: most machines have none, and nothing is imported for them then."""

from __future__ import annotations

from pathlib import Path

__all__ = ["may_have_gpus"]


def may_have_gpus(gpu: str, root: Path = Path("/")) -> bool:
    """Whether looking for GPUs may find any.

    Args:
        gpu: the setting, as in `zcactor.config.Config.gpu`.
        root: the folder of ``dev``.
    """
    if gpu in ("auto", "off"):  # Windows gives its guests the file dxg
        return any((root / "dev").glob("nvidia*")) or (root / "dev/dxg").exists()
    return True
