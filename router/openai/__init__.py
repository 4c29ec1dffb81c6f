"""The OpenAI-compatible HTTP surface: schema, chat, completions, SSE."""
