import json
import platform

import httpx
import pytest
import torch
from huggingface_hub.utils._paths import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from baton import cpu_features
from baton.errors import ModelLoadError
from baton_engine.kernels.cpu.product_choice import Bfloat16Product
from baton_engine.models.config import (
    choose_dtype,
    is_widened,
    kv_layout,
    load_spec,
    resolve_model,
)
from baton_engine.models.rotary import RopeScaling, inverse_frequencies
from tests.baton_engine.tiny_models import FAMILIES, make_model

CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path):
    return make_model(tmp_path / "llama", "llama")


def rewrite(directory, **changes):
    """Changes fields of config.json; None removes one."""
    file = directory / "config.json"
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(
        json.dumps({name: value for name, value in values.items() if value is not None})
    )
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_recognised_with_what_sets_it_apart(tmp_path, family):
    spec = load_spec(make_model(tmp_path, family))
    assert spec.family == family.removesuffix("3" if family == "llama3" else "")
    assert spec.qkv_bias == (family == "qwen2")
    assert spec.qk_norm == (family == "qwen3")
    assert spec.windows == ((24, 24) if family == "mistral" else (None, None))
    assert (spec.rope.scaling is RopeScaling.LLAMA3) == (family == "llama3")
    assert (spec.head_dim, spec.num_kv_heads, spec.eos_token_ids) == (16, 2, (2,))


def test_older_files_with_rope_theta_and_rope_scaling_mean_the_same(tmp_path):
    directory = make_model(tmp_path, "llama3")
    new = load_spec(directory).rope
    scaling = json.loads((directory / "config.json").read_text())["rope_parameters"]
    theta = scaling.pop("rope_theta")
    rewrite(directory, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    assert load_spec(directory).rope == new


def test_linear_scaling_is_read_also_under_its_oldest_name(directory):
    rewrite(directory, rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0})
    rope = load_spec(directory).rope
    assert (rope.scaling, rope.factor, rope.theta) == (RopeScaling.LINEAR, 2.0, 10000.0)


@pytest.mark.parametrize("parameters", [{}, {"rope_type": "default", "rope_theta": 10000.0}])
def test_a_scaling_that_was_added_to_a_newer_file_counts(directory, parameters):
    scaling = {"type": "linear", "factor": 2.0}
    rewrite(directory, rope_parameters=parameters, rope_scaling=scaling, rope_theta=50000.0)
    rope = load_spec(directory).rope
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(inverse_frequencies(rope, 16), model.model.rotary_emb.inv_freq)
    assert (rope.scaling, rope.factor) == (RopeScaling.LINEAR, 2.0)
    rewrite(directory, rope_scaling=scaling | {"type": "yarn"})
    with pytest.raises(ModelLoadError, match="rope_scaling: "):
        load_spec(directory)


def test_the_length_before_stretching_may_stand_beside_the_scaling(tmp_path):
    directory = make_model(tmp_path, "llama3")
    rewrite(directory, original_max_position_embeddings=32)
    rope = load_spec(directory).rope
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.allclose(inverse_frequencies(rope, 16), model.model.rotary_emb.inv_freq)
    assert rope.original_max_position == 32


def test_the_base_of_a_newer_file_counts_beside_a_scaling_that_was_added(directory):
    """Such a file has it nowhere else."""
    parameters = {"rope_type": "default", "rope_theta": 50000.0}
    scaling = {"rope_type": "linear", "factor": 2.0}
    rewrite(directory, rope_parameters=parameters, rope_scaling=scaling)
    rope = load_spec(directory).rope
    assert (rope.scaling, rope.theta) == (RopeScaling.LINEAR, 50000.0)


def test_generation_config_has_the_last_word_on_ends(directory):
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_spec(directory).eos_token_ids == (7, 9)
    (directory / "generation_config.json").write_text("{}")
    assert load_spec(directory).eos_token_ids == (2,)


def test_qwen_windows_of_files_without_layer_types(tmp_path):
    directory = make_model(tmp_path, "qwen2", num_layers=3)
    changes = {"layer_types": None, "sliding_window": 8, "max_window_layers": 1}
    rewrite(directory, use_sliding_window=True, **changes)
    assert load_spec(directory).windows == (None, 8, 8)
    rewrite(directory, use_sliding_window=False)
    assert load_spec(directory).windows == (None, None, None)
    rewrite(directory, layer_types=["sliding_attention"] * 3)
    assert load_spec(directory).windows == (None, None, None)


def test_a_mistral_file_that_leaves_the_window_out_means_transformers_own(tmp_path):
    directory = make_model(tmp_path, "mistral")
    rewrite(directory, sliding_window=None)
    assert load_spec(directory).windows == (4096, 4096)
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**values, "sliding_window": None}))
    assert load_spec(directory).windows == (None, None)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ({"architectures": None, "model_type": None}, "none named is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: type is 'yarn'"),
        ({"partial_rotary_factor": 0.5}, r"config.json: partial_rotary_factor is 0\.5"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta is nan"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"eos_token_id": "end"}, "eos_token_id"),
    ],
)
def test_what_cannot_be_served_is_named_in_one_line(directory, changes, complaint):
    (directory / "generation_config.json").unlink()
    with pytest.raises(ModelLoadError, match=complaint) as caught:
        load_spec(rewrite(directory, **changes))
    assert "\n" not in str(caught.value)


def test_unknown_layer_types_are_refused(tmp_path):
    directory = make_model(tmp_path, "qwen2", use_sliding_window=True, sliding_window=8)
    with pytest.raises(ModelLoadError, match="layer_types"):
        load_spec(rewrite(directory, layer_types=["chunked_attention"] * 2))


def test_a_directory_without_config_is_no_model(tmp_path):
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        load_spec(tmp_path)


def test_a_config_that_is_not_json_is_named(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        load_spec(directory)


def test_fingerprints_are_equal_for_equal_files_and_differ_for_other_weights(tmp_path):
    prints = {
        name: load_spec(make_model(tmp_path / name, "llama", seed=seed)).fingerprint
        for name, seed in (("a", 1), ("again", 1), ("other", 2))
    }
    assert prints["a"] == prints["again"] != prints["other"]


def test_fingerprints_differ_for_fine_tunes_whose_files_begin_and_end_alike(tmp_path):
    directory = make_model(tmp_path, "llama", num_layers=4, hidden_size=256)
    before = load_spec(directory).fingerprint
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"] *= 1.01
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert load_spec(directory).fingerprint != before


def test_a_local_directory_is_itself(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "model",
    [*("./missing", "/no/such/dir", "a/b/c"), *("~/no-such-model", "~nobody-of-this-name/model")],
)
def test_a_missing_path_is_refused_without_asking_the_hub(model, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked"))
    with pytest.raises(ModelLoadError, match="does not exist"):
        resolve_model(model)


def test_a_hub_id_is_downloaded_at_its_revision(tmp_path, monkeypatch):
    asked = []

    def download(model, revision, allow_patterns, ignore_patterns):
        names = ["model.safetensors", "consolidated.safetensors", "pytorch_model.bin"]
        wanted = filter_repo_objects(
            names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        asked.append((model, revision, list(wanted)))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("org/model", "v1") == tmp_path
    assert asked == [("org/model", "v1", ["model.safetensors"])]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("no route\nto the hub"), "no route"),
        (httpx.ReadError("server disconnected"), "server disconnected"),
        (RuntimeError("CAS service error"), "CAS service error"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_what_the_hub_refuses_or_breaks_off_is_one_clear_line(monkeypatch, error, reason):
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelLoadError, match=f"hub does not give it: {reason}$"):
        resolve_model("org/model")


def test_auto_is_bfloat16_on_a_cpu_only_where_that_is_multiplied_in_bfloat16(tmp_path):
    spec = load_spec(make_model(tmp_path, "llama", dtype=torch.bfloat16))
    assert spec.dtype == "bfloat16"
    for product in Bfloat16Product:
        narrow = product.uncompressed not in (Bfloat16Product.PANELS, Bfloat16Product.WIDENED)
        expected = torch.bfloat16 if narrow else torch.float32
        assert choose_dtype(spec, "auto", CPU, product) == expected
        assert is_widened(spec, "auto", expected) == (not narrow)
        assert not is_widened(spec, "float32", torch.float32)
        assert choose_dtype(spec, "auto", torch.device("cuda"), product) == torch.bfloat16
        assert choose_dtype(spec, "float16", CPU, product) == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_dtype_is_that_of_the_weights_where_no_file_names_one(tmp_path, dtype):
    directory = make_model(tmp_path, "llama", dtype=dtype)
    spec = load_spec(rewrite(directory, dtype=None, torch_dtype=None))
    assert spec.dtype == str(dtype).removeprefix("torch.")


def test_an_unknown_dtype_is_refused(directory):
    with pytest.raises(ModelLoadError, match="int4"):
        choose_dtype(load_spec(directory), "int4", CPU, Bfloat16Product.WIDENED)


def test_the_layout_has_one_named_arena_per_layer(directory):
    layout = kv_layout(load_spec(directory), torch.bfloat16, 16)
    assert layout.layers == ("model.layers.0", "model.layers.1")
    assert (layout.dtype, layout.block_tokens, layout.num_kv_heads) == ("bfloat16", 16, 2)


def test_cpu_flags_hold_what_every_such_processor_has():
    everywhere = {"x86_64": "sse2", "aarch64": "asimd"}
    if platform.machine() not in everywhere:
        pytest.skip(f"no flag is known that every {platform.machine()} has")
    assert everywhere[platform.machine()] in cpu_features.cpu_flags()


def test_the_largest_cache_is_one_that_a_processor_may_have():
    assert 64 << 10 <= cpu_features.largest_cache_bytes() <= 4 << 30
