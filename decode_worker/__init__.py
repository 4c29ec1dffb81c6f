"""The memory-bound leg: takes KV pages and streams tokens."""
