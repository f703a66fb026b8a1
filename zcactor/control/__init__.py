"""The head: actors, nodes, resources and names of a cluster; and the agents of its nodes."""
