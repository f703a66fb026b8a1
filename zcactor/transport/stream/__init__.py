"""Frames in streams of bytes: sockets, the handshake, and the records that frames are encrypted in."""
