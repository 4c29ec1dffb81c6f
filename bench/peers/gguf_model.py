"""The benchmarks' models as GGUF files, which llama.cpp reads: the same weights,
from the directory that `bench.harness.shapes` wrote.

Names of tensors and of metadata, and the quantised formats, are those of the library `gguf`. What it leaves to the
converter is here: which tensors keep float32, and in which order llama.cpp wants the rows of Llama's queries and keys.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, LlamaFileType


def write_gguf(directory: Path, file: Path, precision: str) -> None:
    """Writes the Llama or Qwen2 model in `directory` as `file`.

    Args:
        directory: Config, safetensors and tokenizer.
        file: Is overwritten.
        precision: Of the matrices: `f32`, `f16`, `bf16` or `q8_0`. Vectors (norms and biases) are float32 in each, as
            llama.cpp wants them.

    Raises:
        ModuleNotFoundError: The library `gguf` is not installed.
    """
    import gguf  # here: only the comparison with llama.cpp needs it

    config = json.loads((directory / "config.json").read_text())
    family = config["model_type"]
    held = gguf.GGMLQuantizationType[precision.upper()]
    writer = gguf.GGUFWriter(file, family)
    _describe(writer, config)
    writer.add_file_type(_file_type(held))
    _add_tokenizer(writer, directory)
    names = gguf.get_tensor_name_map(_architecture(family), config["num_hidden_layers"])
    for name, weight in _weights(directory):
        kind = held if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        rows = _turned(name, weight, config) if family == "llama" else weight
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        writer.add_tensor(new_name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection, `[heads * head_dim, hidden]`, with the halves of each head interleaved.

    Checkpoints rotate a head's element i with element i + head_dim / 2; for Llama, llama.cpp rotates neighbours, as
    Meta's own checkpoints do.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _turned(name: str, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = name.split(".")[-2]
    return interleave_rotary(weight, config[heads[part]]) if part in heads else weight


def _architecture(family: str) -> "MODEL_ARCH":
    from gguf import MODEL_ARCH

    return MODEL_ARCH[family.upper()]


def _file_type(held: "GGMLQuantizationType") -> "LlamaFileType":
    from gguf import LlamaFileType

    return LlamaFileType["ALL_F32" if held.name == "F32" else f"MOSTLY_{held.name}"]


def _describe(writer: "GGUFWriter", config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: "GGUFWriter", directory: Path) -> None:
    from gguf import TokenType

    vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocab, key=lambda token: int(vocab[token]))
    special = {"<s>", "</s>"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    )
    # llama.cpp insists on merges; ours has none. This one's result is no token, so it changes nothing.
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(vocab["<s>"])
    writer.add_eos_token_id(vocab["</s>"])
    writer.add_add_bos_token(False)


def _weights(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    import torch  # numpy has no bfloat16, so safetensors reads it by torch
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a dict
            yield name, tensors.get_tensor(name).to(torch.float32).numpy()
