"""Anthropic's API: messages, and how many tokens they have. What it shares with OpenAI's is `router.generation`."""
