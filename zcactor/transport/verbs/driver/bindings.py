"""The choice of a binding of libibverbs, or the reason against each of them.

pyverbs is tried first: it belongs to rdma-core, so it fits the installed drivers. Machines without RDMA are the normal
case, so they get an answer and not an exception.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

import msgspec

from zcactor.transport.verbs.driver.presence import ROOT, has_device

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    from zcactor.transport.verbs.driver.base import Binding

__all__ = ["NAMES", "Absent", "Reason", "bindings"]

NAMES: Final = ("pyverbs", "ibverbs")
"""The bindings, in the order of preference."""

_INSTALL: Final = {
    "pyverbs": "apt install python3-pyverbs (its CPython must be this one's: Debian's is for Debian's python3)",
    "ibverbs": "pip install 'zcactor[rdma]'",
}
_NOT_INSTALLED: Final = "the package is not installed"
_NO_KERNEL: Final = (
    "load the adapter's driver and ib_uverbs (modprobe ib_uverbs; rdma link shows the result); without hardware: "
    "modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0"
)
_NO_ACCESS: Final = (
    "apt install ibverbs-providers, and give the process /dev/infiniband (Docker: --device=/dev/infiniband "
    "--ulimit memlock=-1)"
)


class Reason(msgspec.Struct, frozen=True):
    """The reason against one binding."""

    binding: str
    cause: str
    fix: str
    """The command or package that helps."""

    def __str__(self) -> str:
        return f"{self.binding}: {self.cause}; {self.fix}"


class Absent(msgspec.Struct, frozen=True):
    """No binding can be used."""

    reasons: tuple[Reason, ...]

    @property
    def fix(self) -> str:
        """The first remedy: that of an installed binding, where there is such a binding, before the installation of
        another one."""
        there = [one for one in self.reasons if one.cause != _NOT_INSTALLED]
        return (there or self.reasons)[0].fix

    @property
    def cause(self) -> str:
        """The reason in one line."""
        return "; ".join(f"{one.binding}: {one.cause}" for one in self.reasons)

    def __str__(self) -> str:
        return "no RDMA: " + "\n".join(map(str, self.reasons))


def _why_not_imported(name: str, error: Exception) -> Reason:
    """Find the cause of a failed import."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == name:
        return Reason(name, _NOT_INSTALLED, _INSTALL[name])
    if "IBVERBS_PRIVATE" in text or "version `" in text:
        return Reason(
            name,
            f"it was built for another rdma-core than the installed one ({text})",
            "install both from the same source (apt install python3-pyverbs), or take the binding that fits any: pip "
            "install 'zcactor[rdma]'",
        )
    if "libibverbs" in text:
        return Reason(
            name, f"libibverbs cannot be loaded ({text})", "apt install libibverbs1 ibverbs-providers (rdma-core)"
        )
    return Reason(name, f"it cannot be imported ({text})", f"reinstall it: {_INSTALL[name]}")


def _why_no_device(name: str, error: OSError | None, root: Path) -> Reason:
    """Find the cause of an empty or failed list of devices."""
    suffix = "" if error is None else f" ({error})"
    if not root.is_dir():
        return Reason(name, f"this kernel has no RDMA, or has not loaded it{suffix}", _NO_KERNEL)
    if any(root.iterdir()):
        return Reason(name, f"the kernel has RDMA devices that libibverbs cannot use{suffix}", _NO_ACCESS)
    return Reason(name, f"the kernel has RDMA and no device{suffix}", _NO_KERNEL)


def bindings(
    which: str | None = None,
    *,
    quick: bool = False,
    importer: Callable[[str], ModuleType] = importlib.import_module,
    root: Path = ROOT,
) -> Binding | Absent:
    """Return the first binding that can be imported and lists a device.

    Args:
        which: ``"pyverbs"`` or ``"ibverbs"`` to try only that, ``"none"`` for neither, None or ``""`` for both.
        quick: where the kernel lists no device, import nothing: importing a binding takes tenths of a second, which
            every process would pay on hosts without RDMA.
        importer: imports a module by its full name.
        root: the folder in which the kernel lists its devices.

    Returns:
        The binding, or an `Absent` with one reason for each that was tried. No exception of a binding is raised.
    """
    if which == "none":
        return Absent((Reason("none", "the setting verbs is off", "unset it"),))
    if which and which not in NAMES:
        return Absent((Reason(which, "no such binding", f"name one of {', '.join(NAMES)}"),))
    if quick and not has_device(root):
        return Absent((Reason("the kernel", f"it lists no RDMA device in {root}", _NO_KERNEL),))
    # Imported here only: with all their imports they are the larger part of this package.
    from zcactor.transport.verbs.driver import ibverbs_adapter, pyverbs_adapter

    loaders: dict[str, Callable[[Callable[[str], ModuleType]], Binding]] = {
        "pyverbs": pyverbs_adapter.load,
        "ibverbs": ibverbs_adapter.load,
    }
    reasons = []
    for name in (which,) if which else NAMES:
        try:
            binding = loaders[name](importer)
        except Exception as error:  # a binding that raises anything cannot be used
            reasons.append(_why_not_imported(name, error))
            continue
        try:
            if binding.devices():
                return binding
        except OSError as error:
            reasons.append(_why_no_device(name, error, root))
        else:
            reasons.append(_why_no_device(name, None, root))
    return Absent(tuple(reasons))
