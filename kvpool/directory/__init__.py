"""Which node of the pool holds which block: in this process, or in Redis."""
