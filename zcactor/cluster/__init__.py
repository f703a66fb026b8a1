"""Bringing nodes up and down."""

__all__: list[str] = []
