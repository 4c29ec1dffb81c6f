"""POST /v1/responses: OpenAI's newer API. Stateless: replies are not stored, so a request to see, delete or cancel one
is answered that there is none (`router.openai.stored`).
"""
