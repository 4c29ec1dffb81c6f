"""Which sequence owns which KV page: reference counts, prefix sharing, the arena itself."""
