"""Nodes that outlive the command that starts them: their start, their end, and the files that list them."""

__all__: list[str] = []
