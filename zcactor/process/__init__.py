"""The context of a process: the state that each of its parts may use."""
