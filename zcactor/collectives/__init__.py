"""Groups of actors, and the operations that their members do together on arrays."""
