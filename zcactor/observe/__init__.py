"""Counters of every frame, byte moved and byte copied."""
