"""The KV pages themselves: reference counts, the prefix tree, the arena. Which sequence owns which stands in
`scheduling/kv_cache_manager.py`.
"""
