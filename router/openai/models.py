"""GET /v1/models, POST /tokenize and POST /detokenize: what is served, and how it reads text."""

from starlette.requests import Request

from router.openai.body import read_body
from router.openai.length import check_text
from router.openai.prompting import dialogue_tokens
from router.openai.replies import Detokenized, ModelCard, ModelList, Tokenized
from router.openai.serving import Serving
from router.openai.token_requests import DetokenizeRequest, TokenizeRequest
from router.openai.visit import visit_of
from router.openai.vocabulary import check_vocabulary
from router.ports import ServedModel


async def model_list(request: Request, serving: Serving) -> ModelList:
    """All names by which this tenant may ask for the one model."""
    names = serving.names_for(visit_of(request).tenant)
    return ModelList(data=[await _card(name, serving) for name in names])


async def model_card(name: str, request: Request, serving: Serving) -> ModelCard:
    """One name.

    Raises:
        ModelNotFoundError: It is not served, or not to this tenant.
    """
    return await _card(serving.require_name(name, visit_of(request)), serving)


async def _card(name: str, serving: Serving) -> ModelCard:
    model = await serving.generator.model()
    return ModelCard(
        id=name,
        created=serving.created_s,
        root=serving.model_names[0],
        revision=serving.revision,
        max_model_len=None if model is None else model.max_model_len,
    )


async def tokenize(request: Request, serving: Serving) -> Tokenized:
    """The token ids of a prompt or a conversation."""
    body = await read_body(request, TokenizeRequest, serving.max_body_bytes)
    if body.model is not None:
        serving.require_name(body.model, visit_of(request))
    model = await serving.require_model()
    tokens = await _token_ids(body, serving, model)
    texts = serving.tokenizer.token_texts(tokens) if body.return_token_strs else None
    return Tokenized(
        count=len(tokens), max_model_len=model.max_model_len, tokens=tokens, token_strs=texts
    )


async def _token_ids(body: TokenizeRequest, serving: Serving, model: ServedModel) -> list[int]:
    if body.prompt is not None:
        check_text(body.prompt, model, serving.tokenizer, "prompt")
        special = body.add_special_tokens is not False
        return await serving.tokenizer.encode(body.prompt, add_special_tokens=special)
    return await dialogue_tokens(
        body.dialogue(),
        model,
        serving.tokenizer,
        add_special_tokens=bool(body.add_special_tokens),
    )


async def detokenize(request: Request, serving: Serving) -> Detokenized:
    """The text of token ids."""
    body = await read_body(request, DetokenizeRequest, serving.max_body_bytes)
    if body.model is not None:
        serving.require_name(body.model, visit_of(request))
    check_vocabulary(body.tokens, await serving.require_model(), "tokens")
    return Detokenized(prompt=await serving.tokenizer.decode(body.tokens))
