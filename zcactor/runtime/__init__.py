"""Processes: the driver, the node agent, the zygote and the workers, and what runs in them."""
