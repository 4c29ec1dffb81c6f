"""The committed demo model: small, an ordinary Hugging Face directory, and it knows its answers."""

import random

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from baton_engine.demo.training.conversations import GREETING, TrainingMessage
from baton_engine.demo.training.evaluate import answer, load_model
from baton_engine.demo.training.questions import MODEL_DIRECTORY, load_questions
from baton_engine.demo.training.tokenizer import encode_conversation

MAX_SIZE_BYTES = 8_000_000
NUM_SAMPLED_QUESTIONS = 50
REQUIRED_EXACT_SHARE = 0.8
# The same as in `baton_engine.demo.training.evaluate`, whose figures the README quotes.
SEED = 0


@pytest.fixture(scope="module")
def loaded() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model in float32 and its tokenizer, as transformers loads them."""
    return load_model(MODEL_DIRECTORY, torch.float32)


@pytest.fixture(scope="module")
def tokenizer(loaded: tuple[LlamaForCausalLM, PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    """The tokenizer alone."""
    return loaded[1]


def test_the_directory_is_at_most_eight_megabytes() -> None:
    sizes_bytes = [path.stat().st_size for path in MODEL_DIRECTORY.rglob("*") if path.is_file()]
    assert 0 < sum(sizes_bytes) <= MAX_SIZE_BYTES


def test_the_chat_template_renders_system_messages_and_several_turns(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    rendered = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be concise."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": " What does len do?\n"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert rendered == (
        "<|system|>Be concise.<|end|><|user|>Hello<|end|><|assistant|>Hello!<|end|>"
        "<|user|>What does len do?<|end|><|assistant|>"
    )


def test_training_encodes_a_conversation_as_the_chat_template_does(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    conversation = [
        TrainingMessage(role="system", content="Be concise."),
        TrainingMessage(role="user", content="What does len do?"),
        TrainingMessage(role="assistant", content="Return the number of items in a container."),
    ]
    chat = [{"role": message.role, "content": message.content} for message in conversation]
    raw_tokenizer = Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))
    token_ids, _ = encode_conversation(raw_tokenizer, conversation)
    assert token_ids == tokenizer.apply_chat_template(chat, return_dict=False)


def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "Grüße, 世界! \U0001f600\n\t x  == 1e-4 <not a token>"
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert max(token_ids) < len(tokenizer)


def test_most_sampled_training_questions_are_answered_word_for_word(
    loaded: tuple[LlamaForCausalLM, PreTrainedTokenizerBase],
) -> None:
    questions = random.Random(SEED).sample(load_questions(), NUM_SAMPLED_QUESTIONS)
    given = answer(*loaded, [question.question for question in questions])
    num_exact = sum(
        said == question.answer for said, question in zip(given, questions, strict=True)
    )
    assert num_exact >= REQUIRED_EXACT_SHARE * NUM_SAMPLED_QUESTIONS


def test_it_says_what_it_is_when_greeted_and_knows_os_path_join(
    loaded: tuple[LlamaForCausalLM, PreTrainedTokenizerBase],
) -> None:
    assert answer(*loaded, ["Hello", "What does os.path.join do?"]) == [
        GREETING,
        "Join two or more pathname components, inserting '/' as needed.",
    ]
