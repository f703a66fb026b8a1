"""Worker processes: how a node starts, watches and ends them."""
