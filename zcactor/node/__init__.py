"""The programs of a node's processes: its agent, and its workers."""
