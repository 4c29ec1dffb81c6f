"""Tiny models with random weights, as `transformers` builds them, and quantised ones that are written here."""

import json
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "torch_dtype": "float32",
}
_PLAIN_HEADS = {name: value for name, value in SMALL.items() if name != "head_dim"} | {
    "hidden_size": 128
}
"""Of families whose heads share the hidden size out among them."""
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_WINDOWS: dict[str, Any] = SMALL | {"num_hidden_layers": 6, "sliding_window": 64}
_ALL_HEADS = {name: value for name, value in _PLAIN_HEADS.items() if name != "num_key_value_heads"}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SMALL),
    "llama-tied": ("LlamaConfig", SMALL | {"tie_word_embeddings": True}),
    "mistral-window": ("MistralConfig", SMALL | {"sliding_window": 64}),
    "qwen2-biased": ("Qwen2Config", _PLAIN_HEADS),
    "qwen3": ("Qwen3Config", SMALL),
    "qwen3-moe": ("Qwen3MoeConfig", SMALL | _EXPERTS),
    "mixtral": (
        "MixtralConfig",
        SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "olmoe": ("OlmoeConfig", _PLAIN_HEADS | {"num_experts": 4, "num_experts_per_tok": 2}),
    "gemma2-soft-caps": (
        "Gemma2Config",
        _WINDOWS
        | {"query_pre_attn_scalar": 32, "final_logit_softcapping": 5.0, "initializer_range": 0.05},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        _WINDOWS | {"query_pre_attn_scalar": 32, "tie_word_embeddings": False},
    ),
    "gpt-oss": (
        "GptOssConfig",
        SMALL
        | {
            "num_hidden_layers": 5,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "pad_token_id": 0,
            "rope_scaling": None,
        },
    ),
    "phi3": ("Phi3Config", _PLAIN_HEADS | {"pad_token_id": 0}),
    "olmo2": ("Olmo2Config", _PLAIN_HEADS),
    "starcoder2": ("Starcoder2Config", _PLAIN_HEADS | {"sliding_window": None}),
    "cohere-parallel": ("CohereConfig", _PLAIN_HEADS | {"logit_scale": 0.5}),
    "gpt-neox-parallel": ("GPTNeoXConfig", _ALL_HEADS),
    "glm4": ("Glm4Config", SMALL | {"pad_token_id": 0}),
    "granite": ("GraniteConfig", _PLAIN_HEADS | {"attention_multiplier": 0.2}),
    "gpt2-positions": (
        "GPT2Config",
        {"vocab_size": 256, "n_positions": 512, "n_embd": 128, "n_layer": 3, "n_head": 4}
        | {"initializer_range": 0.3, "torch_dtype": "float32"},
    ),
    "deepseek-v2-latent": (
        "DeepseekV2Config",
        {name: value for name, value in SMALL.items() if name != "head_dim"}
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
}
"""By name: the class of the configuration in `transformers`, and its arguments."""


def make_model(family: str, folder: Path, **overrides: Any) -> None:
    """Writes the model of a family, in float32."""
    import torch
    import transformers

    torch.manual_seed(7)
    of_class, arguments = FAMILIES[family]
    config = getattr(transformers, of_class)(**arguments | overrides)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.float32).save_pretrained(folder)


QUANTISED = ("compressed-tensors-w8a8", "gptq-int4", "awq-int4", "fp8")


def make_quantised(how: str, folder: Path) -> None:
    """Writes a Llama whose linear layers are quantised; their values are drawn, not derived."""
    import torch
    from safetensors.torch import load_file, save_file

    make_model("llama", folder)
    weights = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(9)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        rows, columns = weights[name].shape
        stem = name.removesuffix("weight")
        match how:
            case "compressed-tensors-w8a8":
                scale = weights[name].abs().amax(1, keepdim=True) / 127
                weights[name] = (weights[name] / scale).round().to(torch.int8)
                weights[f"{stem}weight_scale"] = scale
            case "fp8":
                scale = weights[name].abs().max() / 448
                weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
                weights[f"{stem}weight_scale"] = scale
            case "gptq-int4" | "awq-int4":
                del weights[name]
                groups = columns // 32
                packed = (columns // 8, rows) if how == "gptq-int4" else (columns, rows // 8)
                weights[f"{stem}qweight"] = torch.randint(
                    -(2**31), 2**31 - 1, packed, generator=draw, dtype=torch.int64
                ).to(torch.int32)
                zero = (
                    0x77777777 if how == "gptq-int4" else -0x77777778
                )  # of 8, which gptq stores less 1
                weights[f"{stem}qzeros"] = torch.full((groups, rows // 8), zero, dtype=torch.int32)
                scales = 0.02 + 0.03 * torch.rand((groups, rows), generator=draw)
                weights[f"{stem}scales"] = scales.to(torch.float16)
                if how == "gptq-int4":
                    weights[f"{stem}g_idx"] = torch.arange(columns, dtype=torch.int32) // 32
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = _SCHEMES[how]
    (folder / "config.json").write_text(json.dumps(config))


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_SCHEMES: dict[str, dict[str, Any]] = {
    "compressed-tensors-w8a8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _INT8 | {"strategy": "channel", "dynamic": False},
                "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
            }
        },
    },
    "gptq-int4": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
    },
    "awq-int4": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}
