"""Peers on this host: a unix socket for frames, and each arena mapped by its peers."""
