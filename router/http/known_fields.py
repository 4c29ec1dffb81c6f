"""Every field that OpenAI's, Anthropic's and vLLM's protocols have for a request, and what becomes of it at each
endpoint.

A field is obeyed; or has no effect here, so that the request is answered and the field is named in the header
`x-baton-ignored`; or is refused by its name, because without it the answer would be another one. Fields that stand in
no row are answered and named in that header too. `docs/openai-conformance.md` shows the table, and tests hold it
against the protocols and the request models.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum


class Api(Enum):
    """An endpoint that reads a body; its path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"


CHAT, COMPLETIONS = {Api.CHAT}, {Api.COMPLETIONS}
RESPONSES, MESSAGES = {Api.RESPONSES}, {Api.MESSAGES}
TOKENIZE, DETOKENIZE, COUNT_TOKENS = {Api.TOKENIZE}, {Api.DETOKENIZE}, {Api.COUNT_TOKENS}
GENERATING = CHAT | COMPLETIONS | RESPONSES | MESSAGES
COUNTING = COUNT_TOKENS | TOKENIZE | DETOKENIZE
EVERYWHERE = GENERATING | COUNTING
CONVERSATIONS = CHAT | RESPONSES | MESSAGES | COUNT_TOKENS

ELSEWHERE = "Other endpoints take it, this one does not."
NOT_STORED = "Nothing is stored here: send the whole conversation."
NO_MEDIA = "Only text is served: there is nothing that it would apply to."


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownField:
    """What becomes of one field.

    Attributes:
        obeyed: Where it is obeyed; the endpoint's model declares it.
        idle: Where it has no effect on what is answered. Where its API is served in full, its type is checked all the
            same.
        refusal: What every other endpoint answers, and why.
        nothing: Values, besides null, that ask for nothing: taken everywhere.
        limits: What of it is not served where it is obeyed.
    """

    obeyed: Collection[Api] = frozenset()
    idle: Collection[Api] = frozenset()
    refusal: str = ELSEWHERE
    nothing: tuple[object, ...] = ()
    limits: str = ""


def _about_output(
    obeyed: Collection[Api], *nothing: object, idle: Collection[Api] = frozenset(), limits: str = ""
) -> KnownField:
    """A field about what is generated, on which no count of a prompt's tokens depends."""
    return KnownField(obeyed=obeyed, idle={*COUNTING, *idle}, nothing=nothing, limits=limits)


def _about_prompt(obeyed: Collection[Api], *nothing: object, limits: str = "") -> KnownField:
    """A field that changes the prompt: never left out in silence."""
    return KnownField(obeyed=obeyed, nothing=nothing, limits=limits)


def _refused(refusal: str, *nothing: object) -> KnownField:
    return KnownField(refusal=refusal, nothing=nothing)


def _idle(obeyed: Collection[Api] = frozenset()) -> KnownField:
    return KnownField(obeyed=obeyed, idle=frozenset(EVERYWHERE) - set(obeyed))


_FORMS = "schemas with keywords that no answer can be held to; tags by `format`"
_SCHEMAS = "schemas with keywords that no answer can be held to"
_BEAMS = (
    "in streams, with forms of answers, or with penalties and other fields that steer what is drawn"
)
_TOOLS = "tools of models whose calls are not known (docs/guides/tools-and-reasoning.md); tools that a server would run"
_CALLS = "choices other than none and auto, of tools to whose schemas calls of the model's family cannot be held"
_THOUGHTS = "Reasoning is told apart in chats and responses; messages have `thinking`."
_FUNCTIONS = "functions that may be called: send them as `tools`"

FIELDS: Mapping[str, KnownField] = {
    "model": KnownField(obeyed=EVERYWHERE),
    # How tokens are drawn, and when that ends.
    "allowed_token_ids": _about_output(GENERATING),
    "bad_words": _about_output(GENERATING, []),
    "frequency_penalty": _about_output(GENERATING),
    "ignore_eos": _about_output(GENERATING),
    "include_stop_str_in_output": _about_output(GENERATING),
    "logit_bias": _about_output(GENERATING),
    "max_completion_tokens": _about_output(CHAT),
    "max_output_tokens": _about_output(RESPONSES),
    "max_tokens": _about_output(CHAT | COMPLETIONS | MESSAGES),
    "min_p": _about_output(GENERATING),
    "min_tokens": _about_output(GENERATING),
    "presence_penalty": _about_output(GENERATING),
    "repetition_penalty": _about_output(GENERATING),
    "seed": _about_output(GENERATING),
    "stop": _about_output(CHAT | COMPLETIONS | RESPONSES),
    "stop_sequences": _about_output(MESSAGES, []),
    "stop_token_ids": _about_output(GENERATING),
    "temperature": _about_output(GENERATING),
    "top_k": _about_output(GENERATING),
    "top_p": _about_output(GENERATING),
    # How the likeliest texts are searched for, in place of drawing.
    "early_stopping": _about_output(CHAT | COMPLETIONS, False),
    "length_penalty": _about_output(CHAT | COMPLETIONS, 1),
    "use_beam_search": _about_output(CHAT | COMPLETIONS, False, limits=_BEAMS),
    # What is answered.
    "best_of": _about_output(COMPLETIONS, 0, 1),
    "include": _about_output(RESPONSES, [], limits="entries other than log-probabilities are ignored"),
    "logprobs": _about_output(CHAT | COMPLETIONS, False),
    "metadata": KnownField(obeyed=RESPONSES, idle=EVERYWHERE - RESPONSES),
    "modalities": _about_output(CHAT, ["text"], limits="other outputs than text"),
    "n": _about_output(CHAT | COMPLETIONS, 1),
    "prompt_logprobs": _about_output(CHAT | COMPLETIONS, limits="in streams"),
    "response_format": _about_output(CHAT | COMPLETIONS, {"type": "text"}, limits=_FORMS),
    "return_token_ids": _about_output(CHAT | COMPLETIONS, False),
    "return_tokens_as_token_ids": _about_output(CHAT | COMPLETIONS, False),
    "skip_special_tokens": _about_output(GENERATING),
    "stream": _about_output(GENERATING),
    "stream_interval": _about_output(GENERATING),
    "stream_options": _about_output(
        CHAT | COMPLETIONS, idle=RESPONSES | MESSAGES, limits="without `stream`"
    ),
    "text": _about_output(RESPONSES, {}, {"format": {"type": "text"}}, limits=_SCHEMAS),
    "top_logprobs": _about_output(CHAT | RESPONSES, 0),
    "guided_choice": _about_output(GENERATING),
    "guided_grammar": _about_output(GENERATING),
    "guided_json": _about_output(GENERATING, limits=_SCHEMAS),
    "guided_regex": _about_output(GENERATING),
    "output_format": _about_output(MESSAGES, limits=_SCHEMAS),
    "structured_outputs": _about_output(GENERATING, limits=_FORMS),
    # The class of service, and what the prefix cache shares.
    "cache_salt": _about_output(GENERATING),
    "priority": _about_output(GENERATING),
    "service_tier": _about_output(GENERATING),
    "session_id": _about_output(GENERATING),
    "user": _about_output(GENERATING),
    # The prompt.
    "add_generation_prompt": _about_prompt(CHAT | TOKENIZE, True),
    "add_special_tokens": _about_prompt(CHAT | COMPLETIONS | TOKENIZE, False),
    "chat_template_kwargs": _about_prompt(CONVERSATIONS | TOKENIZE, {}),
    "continue_final_message": _about_prompt(CHAT | TOKENIZE, False),
    "echo": _about_output(CHAT | COMPLETIONS, False),
    "function_call": _about_output(CHAT, "none", "auto", limits=_CALLS),
    "functions": _about_prompt(CHAT, [], limits=_FUNCTIONS),
    "input": _about_prompt(RESPONSES),
    "instructions": _about_prompt(RESPONSES, ""),
    "messages": _about_prompt(CHAT | MESSAGES | COUNT_TOKENS | TOKENIZE),
    "output_config": _about_prompt(MESSAGES | COUNT_TOKENS, {}, limits=_SCHEMAS),
    "prompt": _about_prompt(COMPLETIONS | TOKENIZE),
    "reasoning": _about_prompt(RESPONSES, {}, limits="modes other than standard"),
    "reasoning_effort": _about_prompt(CHAT),
    "suffix": _about_prompt(COMPLETIONS, "", limits="by models that were not made to fill in a middle"),
    "system": _about_prompt(MESSAGES | COUNT_TOKENS, ""),
    "thinking": _about_prompt(MESSAGES | COUNT_TOKENS, {"type": "disabled"}, limits="budgets of models whose reasoning is not known"),
    "tokens": _about_prompt(DETOKENIZE),
    "tool_choice": _about_prompt(CONVERSATIONS, "none", "auto", limits=_CALLS),
    "tools": _about_prompt(CONVERSATIONS, [], limits=_TOOLS),
    "truncate_prompt_tokens": _about_prompt(GENERATING),
    "truncation_side": _about_prompt(GENERATING, "left"),
    "return_token_strs": KnownField(obeyed=TOKENIZE, idle=COUNT_TOKENS | DETOKENIZE, nothing=(False,)),
    # What changes no answer here.
    "access_programs": _idle(),
    "audio": _idle(),
    "cache_control": _idle(),
    "diagnostics": _idle(),
    "fallback_credit_token": _idle(),
    "image": _idle(),
    "max_tool_calls": _idle(),
    "mm_payload": _idle(),
    "moderation": KnownField(
        idle=CHAT | RESPONSES | COUNTING, refusal="This server does not moderate."
    ),
    "parallel_tool_calls": _idle(CHAT | RESPONSES),
    "prediction": _idle(),
    "prompt_cache_key": _idle(),
    "prompt_cache_options": _idle(),
    "prompt_cache_retention": _idle(),
    "return_mm_kwargs": _idle(),
    "return_token_offsets": _idle(),
    "safety_identifier": _idle(),
    "store": _idle(),
    "truncation": _idle(),
    "user_profile_id": _idle(),
    "verbosity": _idle(),
    "web_search_options": _idle(),
    "workspace_id": _idle(),
    # What no endpoint serves.
    "background": _refused(NOT_STORED, False),
    "chat_template": _refused("Conversations are written by the template that the server was started with."),
    "compaction": _refused(NOT_STORED),
    "container": _refused("There are no containers here."),
    "context_management": _refused("Conversations are served as they are sent.", [], {}),
    "conversation": _refused(NOT_STORED),
    "documents": _refused("Templates are given no documents: write them into a message.", []),
    "ec_transfer_params": _refused(NO_MEDIA, {}),
    "enable_response_messages": _refused("Token ids are answered by other endpoints.", False),
    "fallbacks": _refused("One model is served.", []),
    "guided_decoding_backend": _refused("Grammars are enforced by llguidance alone.", "auto", "guidance"),
    "include_reasoning": KnownField(obeyed=CHAT | RESPONSES, refusal=_THOUGHTS, nothing=(True,)),
    "max_thinking_tokens": KnownField(obeyed=CHAT | RESPONSES, refusal=_THOUGHTS, limits="models whose reasoning is not known"),
    "inference_geo": _refused("The workers are where they are.", "global"),
    "kv_transfer_params": _refused("Workers find each other, and hand KV over, by themselves.", {}),
    "logits_processors": _refused("Clients bring no code.", []),
    "logprob_token_ids": _refused("The likeliest tokens are listed, not chosen ones.", []),
    "mcp_servers": _refused("Tools are called by clients, not by this server.", []),
    "media_io_kwargs": _refused(NO_MEDIA, {}),
    "mm_processor_kwargs": _refused(NO_MEDIA, {}),
    "previous_input_messages": _refused(NOT_STORED, []),
    "previous_response_id": _refused(NOT_STORED),
    "prompt_embeds": _refused("Prompts are texts or token ids."),
    "repetition_detection": _refused("Repetition is discouraged by penalties, not detected."),
    "request_id": _refused("Replies have ids of this server; send the header X-Request-Id to name a request."),
    "return_prompt_text": _refused("POST /tokenize shows what the template makes of a conversation.", False),
    "routed_experts_prompt_start": _refused("Which experts computed a token is not told.", 0),
    "spaces_between_special_tokens": _refused("No spaces are put between special tokens.", True),
    "speed": _refused("There is one speed.", "standard"),
    "thinking_token_budget": KnownField(obeyed=CHAT | RESPONSES, refusal=_THOUGHTS, limits="models whose reasoning is not known"),
    "vllm_xargs": _refused("There are no extensions of vLLM's here.", {}),
    "watermarking": _refused("Outputs are not watermarked.", False),
}  # fmt: skip


def is_idle(name: str, value: object, api: Api) -> bool:
    """Whether a field of a request has no effect, though it asks for one. A field that stands in no row has none."""
    known = FIELDS.get(name)
    if known is None:
        return True
    return api in known.idle and value is not None and value not in known.nothing


def refusal_of(name: str, value: object, api: Api) -> str | None:
    """Why an endpoint refuses a field that its model does not declare; None where it does not."""
    known = FIELDS.get(name)
    if known is None or value is None or value in known.nothing:
        return None
    return None if api in known.obeyed or api in known.idle else known.refusal
