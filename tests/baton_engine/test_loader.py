import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from baton.errors import ModelLoadError
from baton_engine.kernels.cpu.matmul import BFloat16Panels, reads_bfloat16
from baton_engine.kernels.cpu.product_choice import Bfloat16Product
from baton_engine.models.config import load_spec
from baton_engine.models.loader import load_decoder
from tests.baton_engine.tiny_models import make_model

CPU = torch.device("cpu")


def load(directory, dtype=torch.float32, progress=None):
    return load_decoder(directory, load_spec(directory), dtype, CPU, progress)


def rewrite_weights(directory, change):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.fixture
def directory(tmp_path):
    return make_model(tmp_path / "model", "qwen2")


def test_projections_are_fused_in_order(directory):
    stored = load_file(directory / "model.safetensors")
    layer = load(directory).layers[1]
    x = torch.randn(3, 64)
    for kind, parts, fused in (
        ("self_attn", "qkv", layer.attention.qkv),
        ("mlp", ("gate", "up"), layer.mlp.gate_up),
    ):
        names = [f"model.layers.1.{kind}.{part}_proj" for part in parts]
        alone = [linear(x, stored[f"{n}.weight"], stored.get(f"{n}.bias")) for n in names]
        torch.testing.assert_close(fused(x), torch.cat(alone, 1))


def test_tied_embeddings_serve_as_the_head(tmp_path):
    decoder = load(make_model(tmp_path, "llama", tie=True))
    x = torch.randn(3, 64)
    torch.testing.assert_close(decoder.head(x), linear(x, decoder.embedding.weight))


@pytest.mark.parametrize("differs", [False, True])
def test_a_head_that_was_stored_beside_tied_embeddings_serves_where_it_differs(tmp_path, differs):
    directory = make_model(tmp_path, "llama", tie=True)
    head = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    own = head + 0.1 if differs else head.clone()
    rewrite_weights(directory, lambda tensors: tensors.update({"lm_head.weight": own}))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    x = torch.randn(3, 64)
    torch.testing.assert_close(load(directory).head(x), model.lm_head(x))
    torch.testing.assert_close(model.lm_head(x), linear(x, own))


@pytest.mark.skipif(not reads_bfloat16(), reason="no vectors that multiply and add")
def test_matrices_that_cannot_be_compressed_stay_as_they_are_and_it_is_said(tmp_path, caplog):
    directory = make_model(tmp_path, "llama", dtype=torch.bfloat16)

    def prune(tensors):
        tensors["model.layers.1.mlp.down_proj.weight"][:, ::2] = 0

    rewrite_weights(directory, prune)
    loaded = {
        product: load_decoder(
            directory, load_spec(directory), torch.float32, CPU, product=Bfloat16Product(product)
        )
        for product in ("panels", "compressed_panels")
    }
    assert "1 of 8 matrices stay at 16 bits" in caplog.text
    layers = loaded["compressed_panels"].layers
    down = [layer.mlp.down for layer in layers if isinstance(layer.mlp.down, BFloat16Panels)]
    assert [panels.codes is not None for panels in down] == [True, False]
    x = torch.randn(3, 128)
    assert torch.equal(layers[1].mlp.down(x), loaded["panels"].layers[1].mlp.down(x))


def test_shards_load_like_one_file(tmp_path):
    whole = load(make_model(tmp_path / "whole", "llama"))
    sharded_directory = make_model(tmp_path / "sharded", "llama", max_shard_size="40KB")
    assert (sharded_directory / "model.safetensors.index.json").exists()
    sharded = load(sharded_directory)
    x, wide = torch.randn(3, 64), torch.randn(3, 128)
    assert torch.equal(whole.head(x), sharded.head(x))
    assert torch.equal(whole.layers[1].mlp.down(wide), sharded.layers[1].mlp.down(wide))


def test_one_file_counts_before_the_index_that_an_earlier_save_has_left(tmp_path):
    directory = make_model(tmp_path, "llama", max_shard_size="40KB")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.lm_head.weight.data.add_(1.0)
    model.save_pretrained(directory)
    assert (directory / "model.safetensors.index.json").exists()
    x = torch.randn(3, 64)
    torch.testing.assert_close(load(directory).head(x), linear(x, model.lm_head.weight.data))


def test_weights_are_converted_to_the_wanted_dtype(directory):
    decoder = load(directory, torch.bfloat16)
    assert decoder.embedding.weight.dtype == torch.bfloat16
    x = torch.randn(3, 64).bfloat16()
    assert decoder.layers[0].attention.qkv(x).dtype == torch.bfloat16


def test_progress_rises_from_none_to_all(directory):
    told = []
    load(directory, progress=lambda what, fraction: told.append(fraction))
    assert told[0] == 0.0
    assert told[-1] == 1.0
    assert told == sorted(told)


def test_truncated_weights_are_named(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is corrupt or truncated"):
        load_spec(directory)


@pytest.mark.parametrize("content", [b"", b"not weights at all"])
def test_weights_that_are_no_safetensors_are_named(directory, content):
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is corrupt"):
        load_spec(directory)


def test_no_weights_at_all_is_said_plainly(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="has no weights"):
        load_spec(directory)


def test_a_missing_tensor_is_named(directory):
    rewrite_weights(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(directory)


def test_a_tensor_of_another_shape_is_named(directory):
    rewrite_weights(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \[3\]"):
        load(directory)


def test_a_config_that_asks_for_more_than_there_is_memory_is_held_against_the_weights(directory):
    config = json.loads((directory / "config.json").read_text())
    config["intermediate_size"] = 10**12
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"gate_proj\.weight has shape \[128, 64\]"):
        load(directory)


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.input_layernorm\.weight and 11 more"),
        ({"architectures": ["LlamaForCausalLM"]}, r"model\.layers\.0\.self_attn\.k_proj\.bias"),
    ],
)
def test_weights_of_another_model_than_the_config_describes_are_refused(directory, changes, tensor):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelLoadError, match=f"describes has no tensor {tensor}"):
        load(directory)


def test_tensors_without_effect_are_passed_over(directory):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(64)
        tensors["value_head.weight"] = torch.ones(1, 64)

    rewrite_weights(directory, add)
    load(directory)


def test_quantised_weights_are_refused(directory):
    eight = torch.zeros(64, dtype=torch.int8)
    rewrite_weights(directory, lambda tensors: tensors.update({"model.norm.weight": eight}))
    with pytest.raises(ModelLoadError, match="stored as I8"):
        load(directory)


@pytest.mark.parametrize(
    ("packed", "complaint"),
    [
        (
            "qweight",
            r"q_proj\.weight is missing from the weights, which have .*q_proj\.qweight; quantised",
        ),
        ("weight_packed", r"which have .*q_proj\.weight_packed; quantised"),
        ("weight", "stored as U8; quantised"),
    ],
)
def test_packed_weights_are_refused_as_what_they_are(directory, packed, complaint):
    name = "model.layers.0.self_attn.q_proj"

    def pack(tensors):
        tensors.pop(f"{name}.weight")
        tensors[f"{name}.{packed}"] = torch.zeros(2048, 1, dtype=torch.uint8)

    rewrite_weights(directory, pack)
    with pytest.raises(ModelLoadError, match=complaint):
        load(directory)


@pytest.mark.parametrize("damage", ["gone", "misplaced", "outside"])
def test_a_broken_index_is_named(tmp_path, damage):
    directory = make_model(tmp_path, "llama", max_shard_size="40KB")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shards = sorted(set(content["weight_map"].values()))
    if damage == "gone":
        (directory / shards[0]).unlink()
        complaint = f"{shards[0]} is missing"
    elif damage == "misplaced":
        content["weight_map"]["model.norm.weight"] = shards[0]
        complaint = "does not hold tensor model.norm.weight"
    else:
        content["weight_map"]["model.norm.weight"] = "../weights.safetensors"
        complaint = "outside its directory"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=complaint):
        load_spec(directory)
