"""The engine: one model on one rank, its paged KV cache, its scheduler and its sampler. Never imports asyncio."""
