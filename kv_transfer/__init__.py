"""Moves KV pages from a prefill worker's arena to a decode worker's: regions, plans, sessions and backends."""
