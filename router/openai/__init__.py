"""OpenAI's APIs: chat, completions, responses, models, tokenization.
What they share with Anthropic's is `router.generation`.
"""
