"""The mypy plugin, which gives classes decorated with `zcactor.actor` the classmethods ``spawn`` and ``options``.

mypy ignores what a class decorator returns, so without help ``Shard.spawn(3)`` is an error for it. Enable with::

    [tool.mypy]
    plugins = ["zcactor.mypy_plugin"]

The plugin builds no signature of its own: it enters `zcactor.api.actor.Actor`'s two methods, whose first parameter is
``Callable[P, T]``, into the decorated class. mypy then derives the constructor's signature at each use, so inherited,
generated (dataclass) and overloaded constructors are as exact as a call of the class itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy.nodes import SymbolTableNode, TypeInfo
from mypy.plugin import ClassDefContext, Plugin

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ActorPlugin", "plugin"]

_DECORATORS = frozenset({"zcactor.actor", "zcactor.api.actor.actor"})
"""The names that mypy may know `zcactor.actor` by: in the package, and in the module that defines it."""

_BASE = "zcactor.api.actor.Actor"
_METHODS = ("spawn", "options")


class ActorPlugin(Plugin):
    """The plugin's hooks for the decorator, bare (``@zc.actor``) and with options (``@zc.actor(...)``)."""

    def get_class_decorator_hook_2(self, fullname: str) -> Callable[[ClassDefContext], bool] | None:
        """The hook for `zcactor.actor`, None for every other decorator."""
        return _add_methods if fullname in _DECORATORS else None


def _add_methods(context: ClassDefContext) -> bool:
    """Enter the methods into the decorated class. The result is False where the base is not known yet: mypy then calls
    again."""
    base = context.api.lookup_fully_qualified_or_none(_BASE)
    if base is None or not isinstance(base.node, TypeInfo):
        return False
    info = context.cls.info
    for name in _METHODS:
        method = base.node.names.get(name)
        if method is None or method.node is None:
            return False
        if info.get(name) is None:  # a class that defines its own, or derives from `Actor`, keeps it
            # Not a copy of the symbol: one that comes from mypy's cache is read at the first use of its node only
            info.names[name] = SymbolTableNode(method.kind, method.node, plugin_generated=True)
    return True


def plugin(version: str) -> type[Plugin]:
    """The plugin class; mypy calls this entry point with its own version."""
    del version  # the hook is the same in every mypy this package is tested with
    return ActorPlugin
