"""The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to a process, by the rules of CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["visible"]


def visible(uuids: Sequence[str], variable: str | None) -> list[int]:
    """The numbers of the visible GPUs among `uuids`, in the order in which the process counts them.

    CUDA reads the list up to the first entry that names no GPU, and a GPU that is named twice makes it empty
    (CUDA C++ Programming Guide, "CUDA Environment Variables").

    Args:
        uuids: of all GPUs of the host, in the driver's order.
        variable: the value of ``CUDA_VISIBLE_DEVICES``: numbers, or beginnings of UUIDs that fit one GPU only. None
            where it is not set: all GPUs are visible.
    """
    if variable is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in variable.split(","):
        text = entry.strip()
        if text.isascii() and text.isdigit():
            fits = [int(text)] if int(text) < len(uuids) else []
        else:
            fits = [number for number, uuid in enumerate(uuids) if text.startswith("GPU-") and uuid.startswith(text)]
        if len(fits) != 1:
            break
        found += fits
    return found if len(set(found)) == len(found) else []
