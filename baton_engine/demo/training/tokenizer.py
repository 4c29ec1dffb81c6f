"""The demo model's tokenizer: byte-level BPE trained on the corpus, and its chat template.

Written as the two JSON files that `transformers.AutoTokenizer` reads. All 256 bytes are in the
vocabulary, so any text encodes, and decoding gives it back.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton_engine.demo.training.conversations import Conversation

END_OF_TURN = "<|end|>"
PADDING = "<|pad|>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (PADDING, END_OF_TURN, *ROLE_TOKENS.values())

# There is no beginning-of-sequence token: a chat starts with a role token, and a prompt that was
# rendered to text and encoded again cannot end up with two of them.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set role = 'system' if message['role'] == 'developer' else message['role'] -%}
{%- if role not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('The demo model knows no role ' + role) -}}
{%- endif -%}
{{- '<|' + role + '|>' + message['content'] | trim + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with at most `vocab_size` tokens, special tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, chat template included, into `directory`."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "pad_token": PADDING,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def special_token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of one of `SPECIAL_TOKENS`."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def encode_conversation(
    tokenizer: Tokenizer, conversation: Conversation
) -> tuple[list[int], list[bool]]:
    """Token ids as the chat template gives them, and for each whether the model is to say it."""
    end_id = special_token_id(tokenizer, END_OF_TURN)
    token_ids: list[int] = []
    is_target: list[bool] = []
    for message in conversation:
        content = tokenizer.encode(message.content).ids
        token_ids += [special_token_id(tokenizer, ROLE_TOKENS[message.role]), *content, end_id]
        is_target += [False] + [message.role == "assistant"] * (len(content) + 1)
    return token_ids, is_target
