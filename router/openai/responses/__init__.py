"""POST /v1/responses: OpenAI's newer API. Nothing is stored between two requests."""
