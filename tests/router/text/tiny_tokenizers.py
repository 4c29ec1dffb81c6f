"""Tokenizers small enough to make in a test, one of each family."""

from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CORPUS = [
    "Hello world, hello token. The quick brown fox says hello world again and again. Ünïcödé 你好"
] * 4


def byte_level() -> Tokenizer:
    """Byte-level BPE with all 256 bytes and a few merges."""
    return Tokenizer.from_str(_trained())


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())


def byte_fallback() -> Tokenizer:
    """As Llama 2's: spaces are `▁`, characters without a token are spelt in bytes, a leading space is dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "c", "h", "i", "▁a", "▁hi", "ab", ".", "é"]
    merges = [("▁", "a"), ("h", "i"), ("▁", "hi"), ("a", "b")]
    vocab = {piece: i for i, piece in enumerate([*pieces, "hi"])}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


def save(
    tokenizer: Tokenizer, directory: Path, *, chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """Writes what a model's directory holds of its tokenizer."""
    from transformers import PreTrainedTokenizerFast  # slow to import; most tests make no files

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = chat_template
    fast.save_pretrained(str(directory))
    return directory


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that is there."""
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found
