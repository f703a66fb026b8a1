"""The device of a process, which all connections share, and the limits of their number."""
