"""The compute-bound leg: reads prompts, produces KV pages, pushes them to decode workers."""
