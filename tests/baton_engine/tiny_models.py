"""Tiny checkpoints of every family with random weights, made with transformers,
for tests that need a real model directory.
"""

import json
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3")
"""`llama3` is a Llama with Llama 3.1's rope scaling; `mistral` has a sliding window of 24 tokens."""

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_CORPUS = (
    "The router decides who runs which leg, so that time to first token keeps its promise.",
    "Prefill workers read prompts and produce pages; decode workers turn them into a stream of tokens.",
    "Grüße aus Zürich: 北京 and Ελλάδα, 😀 and 1234567890.",
)


def make_model(
    directory: Path,
    family: str,
    *,
    tie: bool = False,
    seed: int = 0,
    vocab_size: int = 320,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    hidden_size: int = 64,
    max_position: int = 2048,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    more_special: tuple[str, ...] = (),
    **overrides: Any,
) -> Path:
    """Writes a model directory (config, safetensors, generation config, tokenizer with chat template) and returns it.

    Args:
        directory: Where to; made if need be.
        family: One of `FAMILIES`.
        tie: Whether input and output embeddings are one matrix.
        seed: Of the random weights.
        vocab_size: Rows of the embedding; at least 300, so that the tokenizer fits.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; must divide `num_heads`.
        head_dim: Elements per head.
        hidden_size: Width of the residual stream.
        max_position: Longest context.
        dtype: Of the stored weights.
        max_shard_size: Small enough a size makes transformers write shards with an index.
        more_special: Special tokens that the tokenizer has besides its own.
        overrides: More fields of the transformers config.
    """
    tokenizer = make_tokenizer(vocab_size, more_special)
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": tie,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        # Large enough that attention is far from uniform, so that a wrong position or window shows.
        "initializer_range": 0.15,
        **overrides,
    }
    torch.manual_seed(seed)
    model = _make(family, fields)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(directory)
    return directory


def make_tokenizer(
    vocab_size: int = 320, more_special: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab_size` entries that can spell any text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [PAD, BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", *more_special]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=special[3:],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def random_prompts(
    count: int, longest: int, *, vocab_size: int = 320, seed: int = 0
) -> list[list[int]]:
    """Prompts of 1 to `longest` random tokens, lengths spread evenly, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [list(_tokens(length, vocab_size, generator)) for length in _lengths(count, longest)]


def _lengths(count: int, longest: int) -> list[int]:
    return [1 + round(i * (longest - 1) / max(1, count - 1)) for i in range(count)]


def _tokens(length: int, vocab_size: int, generator: torch.Generator) -> Iterator[int]:
    return iter(torch.randint(6, vocab_size, (length,), generator=generator).tolist())


def _make(family: str, fields: dict[str, Any]) -> PreTrainedModel:
    match family:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**fields))
        case "llama3":
            scaling = {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
            return LlamaForCausalLM(LlamaConfig(**{"rope_parameters": scaling, **fields}))
        case "mistral":
            return MistralForCausalLM(MistralConfig(**{"sliding_window": 24, **fields}))
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**fields))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**fields))
        case _:
            raise ValueError(f"no tiny model of family {family!r}")


def make_eagle3_head(
    directory: Path,
    *,
    target_hidden_size: int = 64,
    target_layers: tuple[int, int, int] = (0, 1, 2),
    draft_vocab_size: int = 200,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Writes an EAGLE-3 head with random weights for a model of the same hidden size, and returns its directory.

    Args:
        directory: Where to; made if need be.
        target_hidden_size: Of the model.
        target_layers: Before which of its layers the head reads.
        draft_vocab_size: Tokens that it can guess, spread over the model's 320.
        seed: Of the random weights.
        changes: Of the config.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": 320,
        "draft_vocab_size": draft_vocab_size,
        "hidden_size": 64,
        "target_hidden_size": target_hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [*target_layers]},
        "torch_dtype": "float32",
    } | changes
    generator = torch.Generator().manual_seed(seed)
    hidden, width, keys = config["hidden_size"], config["intermediate_size"], 16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / sqrt(shape[-1])

    own = torch.arange(draft_vocab_size)
    weights = {
        "midlayer.self_attn.q_proj.weight": random(4 * keys, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": random(keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": random(keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": random(hidden, 4 * keys),
        "midlayer.mlp.gate_proj.weight": random(width, hidden),
        "midlayer.mlp.up_proj.weight": random(width, hidden),
        "midlayer.mlp.down_proj.weight": random(hidden, width),
        "fc.weight": random(hidden, 3 * target_hidden_size),
        "lm_head.weight": 4.0 * random(draft_vocab_size, hidden),
        "d2t": (own * 320 // draft_vocab_size) - own,
        "t2d": torch.zeros(320, dtype=torch.bool),
    } | {
        f"{name}.weight": 1.0 + 0.1 * torch.randn(hidden, generator=generator)
        for name in (
            "norm",
            "midlayer.hidden_norm",
            "midlayer.input_layernorm",
            "midlayer.post_attention_layernorm",
        )
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory
