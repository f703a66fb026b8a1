"""Conversion of call values to and from a small payload and its parts; the only package that knows array types."""

from __future__ import annotations

from zcactor.marshal.marshaller import Marshaller
from zcactor.marshal.move import Move, move
from zcactor.marshal.values import register

__all__ = ["Marshaller", "Move", "move", "register"]
