"""The composition root of a process, and the parts that only it and its users know."""
