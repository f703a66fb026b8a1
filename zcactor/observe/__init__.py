"""Statistics of a process: its frames, and its bytes moved and copied."""
