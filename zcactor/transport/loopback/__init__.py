"""Connections inside one process."""
