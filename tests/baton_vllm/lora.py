"""Tiny LoRA adapters with random weights, in PEFT's format."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(directory: Path, model: Path, *, seed: int, rank: int = 8) -> Path:
    """An adapter of every projection of the checkpoint `model`, large enough to change what is drawn."""
    directory.mkdir()
    random = torch.Generator().manual_seed(seed)
    matrices: dict[str, torch.Tensor] = {}
    with safe_open(model / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - no mapping
            if name.split(".")[-2] not in MODULES:
                continue
            rows, columns = weights.get_slice(name).get_shape()
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            matrices[f"{prefix}.lora_A.weight"] = _drawn(rank, columns, random)
            matrices[f"{prefix}.lora_B.weight"] = _drawn(rows, rank, random)
    save_file(matrices, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    config |= {"target_modules": list(MODULES), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _drawn(rows: int, columns: int, random: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, generator=random) * 0.3
