"""The Anthropic-compatible HTTP surface: /v1/messages over the same jobs as the OpenAI endpoints."""
