"""Verbs behind a small interface: the bindings of libibverbs, and a fabric without hardware."""
