"""The object store: where the arrays of one process live, who reads them, and what was copied.

``ref`` says where bytes are; ``allocator`` hands out offsets; ``arena`` is the memory; ``store`` joins the two into
blocks that are freed with their last array; ``table`` counts what each peer holds of ours; ``lease`` is what we hold
of a peer's; ``copies`` makes and counts every copy of a payload; ``parallel`` lends threads to bulk work on memory.
"""
