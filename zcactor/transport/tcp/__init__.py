"""Peers on any host: a TCP socket for frames, and further ones for the bytes of arrays."""
