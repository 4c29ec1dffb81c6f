"""Models written as GGUF, read back with the library;
by llama.cpp itself where an environment variable names its server.
"""

import os
import random
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.harness.shapes import Shape, write_model
from bench.peers.gguf_model import interleave_rotary, write_gguf
from bench.peers.servers import llamacpp

gguf = pytest.importorskip("gguf", reason="the library gguf is not installed")

SERVER = os.environ.get("LLAMACPP_SERVER", "")
FAMILIES = ("llama", "qwen2")


def write_stirred(family: str, directory: Path) -> None:
    """A model whose layers matter: as drawn, with tied embeddings, it would say its last token again,
    whatever they compute.
    """
    shape = Shape(
        family=family, hidden=128, intermediate=384, layers=2, heads=4, kv_heads=2, vocab=512
    )
    write_model(shape, directory)
    file = directory / "model.safetensors"
    torch.manual_seed(1)
    stirred = {
        name: torch.randn_like(weight)
        if name.endswith("bias")
        else weight * (8.0 if "_proj" in name else 1.0)
        for name, weight in load_file(file).items()
    }
    save_file(stirred, file, metadata={"format": "pt"})


def test_halves_of_each_head_are_interleaved() -> None:
    weight = np.arange(8.0).reshape(8, 1)  # two heads of four elements
    assert interleave_rotary(weight, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_holds_every_tensor_under_its_name_in_gguf(family: str, tmp_path: Path) -> None:
    write_stirred(family, tmp_path)
    write_gguf(tmp_path, tmp_path / "x.gguf", "bf16")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    assert len(tensors) == len(load_file(tmp_path / "model.safetensors"))
    assert {"token_embd.weight", "output_norm.weight", "blk.1.ffn_down.weight"} <= tensors.keys()
    assert ("blk.0.attn_q.bias" in tensors) == (family == "qwen2")
    held = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert held["blk.0.attn_q.weight"] == "BF16"
    assert held["blk.0.attn_norm.weight"] == "F32"


def test_bfloat16_weights_keep_their_bits(tmp_path: Path) -> None:
    write_stirred("qwen2", tmp_path)
    write_gguf(tmp_path, tmp_path / "x.gguf", "bf16")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    weight = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert (
        tensors["blk.0.attn_q.weight"].data.tobytes() == weight.view(torch.int16).numpy().tobytes()
    )


def test_eight_bits_are_those_of_the_library(tmp_path: Path) -> None:
    write_stirred("llama", tmp_path)
    write_gguf(tmp_path, tmp_path / "x.gguf", "q8_0")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    embedding = tensors["token_embd.weight"]
    weight = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    read = gguf.quants.dequantize(embedding.data, embedding.tensor_type)
    assert np.abs(read - weight.float().numpy()).max() <= 0.51 * weight.abs().max().item() / 127


@pytest.mark.slow
@pytest.mark.skipif(not SERVER, reason="LLAMACPP_SERVER names no llama-server")
@pytest.mark.parametrize("family", FAMILIES)
def test_llamacpp_draws_the_tokens_that_transformers_draws(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_stirred(family, tmp_path)
    draw = random.Random(1)
    prompt = [draw.randrange(2, 512) for _ in range(40)]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([prompt])
    right = model.generate(  # type: ignore[misc] # its stub takes no model for one that generates
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
    )
    write_gguf(tmp_path, tmp_path / "x.gguf", "f32")
    asked = {"prompt": prompt, "n_predict": 24, "temperature": 0, "return_tokens": True}
    with llamacpp(SERVER, str(tmp_path / "x.gguf"), 1, "-ctk", "f32", "-ctv", "f32") as url:
        answer = httpx.post(f"{url}/completion", json=asked | {"ignore_eos": True}, timeout=120.0)
    assert answer.json()["tokens"] == right[0, len(prompt) :].tolist()
    assert len(set(answer.json()["tokens"])) > 4
