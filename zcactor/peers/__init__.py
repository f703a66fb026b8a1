"""The connections of a process to others, and its requests to them."""
