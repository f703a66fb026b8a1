"""The objects of a process: where their bytes are, and how they come here."""
