"""The object store: the arena of one process, the leases on its objects, and the count of copies.

``ref`` names bytes in frames; ``allocator`` hands out offsets; ``arena`` is the memory; ``store`` joins the two into
blocks that are freed with their last array; ``table`` counts the leases of each peer on our objects; ``lease`` is a
lease of ours on a peer's object; ``copies`` makes and counts every copy of a payload; ``parallel`` lends threads to
bulk work on memory.
"""
