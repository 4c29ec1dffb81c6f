"""Models with random weights in shapes worth measuring, written as Hugging Face directories."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder's dimensions.

    Attributes:
        family: `llama` or `qwen2`.
        vocab: Size of the vocabulary; embeddings are tied.
    """

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int = 16_384


SHAPES = {
    "tiny": Shape(family="llama", hidden=128, intermediate=384, layers=4, heads=4, kv_heads=2),
    "llama116m": Shape(
        family="llama", hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3
    ),
    "qwen370m": Shape(
        family="qwen2", hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2
    ),
}


def write_model(shape: Shape, directory: Path, *, seed: int = 0) -> None:
    """Writes config, bfloat16 weights and a byte-level tokenizer of `shape` into `directory`."""
    import torch  # here, so that asking a benchmark for --help stays quick
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    families = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }
    config_class, model_class = families[shape.family]
    config = config_class(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    model_class(config).to(torch.bfloat16).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet]
    words += [f"<{index}>" for index in range(len(words), shape.vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)
