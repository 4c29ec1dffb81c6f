"""A worker's side of the pool: reads blocks from the slab of its host's node and publishes full pages to it."""
