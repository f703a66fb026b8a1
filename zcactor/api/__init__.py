"""The public API of programs: actors, handles, references, arrays."""
