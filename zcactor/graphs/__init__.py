"""Graphs: calls of actors' methods along fixed edges, run again and again."""
