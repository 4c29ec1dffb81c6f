"""What the engine must know of a model before its weights are read: the facts of config.json, checked and typed.

Read once at start by every worker, which also learns here the shape of its KV pages and the dtype to compute in.
"""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from baton.errors import ModelLoadError, first_line
from baton.ids import LayerName
from baton.layout import DTYPE_BYTES, KvLayout
from baton_engine.kernels.cpu.product_choice import COMPUTED_IN, Bfloat16Product
from baton_engine.models.checkpoint import Checkpoint, fingerprint, read_checkpoint
from baton_engine.models.json_fields import JsonFields, read_json_fields
from baton_engine.models.rotary import RopeScaling, RopeSpec

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DEFAULT_WINDOW = 4096
"""What transformers takes where a file leaves the window out; null means none."""

_HUB_FILES = [
    "*.json",
    "*.safetensors",
    "tokenizer*",
    "*.model",
    "*.jinja",
    "merges.txt",
    "vocab.*",
]
_HUB_LEFT_OUT = ["consolidated*"]
"""The same weights once more, in Mistral's own layout."""

_TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

_STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only model.

    Attributes:
        family: `llama`, `mistral`, `qwen2` or `qwen3`.
        windows: Per layer, how many tokens back (itself included) a token attends; None for all.
        qkv_bias: Whether the projections of queries, keys and values have a bias.
        output_bias: Whether the attention's output projection has one.
        qk_norm: Whether queries and keys are normalised per head before rotation (Qwen3).
        tied_embeddings: Whether the output head is the embedding matrix, unless the weights hold a head that differs
            from it: then that serves, as in transformers.
        eos_token_ids: Tokens that end a generation, lowest index first as the files list them.
        dtype: Name of the dtype the weights are stored in.
        fingerprint: Equal exactly when two workers hold the same model.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    fingerprint: str

    @property
    def layer_names(self) -> tuple[LayerName, ...]:
        """Names of the layers in computing order, as the weights spell them."""
        return tuple(LayerName(f"model.layers.{index}") for index in range(self.num_layers))


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The directory that holds `model`: a local path, or a snapshot of a Hugging Face hub id (downloaded if need be).

    Blocks for as long as the download takes.

    Raises:
        ModelLoadError: No such directory, or the hub does not give it.
    """
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        return path
    if path.exists():
        raise ModelLoadError(f"model {model!r} is a file, but must be a directory or a hub id")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelLoadError(f"model directory {model!r} does not exist")
    # Imported here: it takes 0.2 s of every start, and a model in a local directory does not need it.
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(
            hub.snapshot_download(
                model,
                revision=revision,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_LEFT_OUT,
            )
        )
    except Exception as error:  # its own, its HTTP client's or its downloader's
        raise ModelLoadError(
            f"model {model!r} is no local directory, and the Hugging Face hub does not give it: {first_line(error)}"
        ) from error


def load_spec(path: Path, families: Mapping[str, str] = FAMILIES) -> ModelSpec:
    """Reads a model directory's config.json, generation_config.json and the headers of its weights.

    Args:
        path: The directory.
        families: Which architectures it may have, and whose rules they follow.

    Raises:
        ModelLoadError: Something is missing, corrupt or not supported; the message names it.
    """
    config = read_json_fields(path / "config.json")
    family = _family(config, path, families)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    layers = config.integer("num_hidden_layers")
    bias = config.flag("attention_bias", default=False)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if config.text("hidden_act", "silu") != "silu":
        raise config.wrong("hidden_act", "'silu', the only activation supported")
    checkpoint = read_checkpoint(path)
    return ModelSpec(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.integer("head_dim", 128 if family == "qwen3" else hidden // heads),
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config),
        windows=_windows(config, family, layers),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family in ("llama", "qwen3"),
        mlp_bias=config.flag("mlp_bias", default=False),
        qk_norm=family == "qwen3",
        tied_embeddings=config.flag("tie_word_embeddings", default=False),
        eos_token_ids=_eos_token_ids(config, path),
        dtype=config.text(
            "dtype", config.text("torch_dtype", _stored_dtype(checkpoint))
        ).removeprefix("torch."),
        fingerprint=fingerprint(checkpoint, config.values),
    )


def quantised(spec: ModelSpec, quantization: str) -> ModelSpec:
    """`spec` under a fingerprint of its own where weights are held otherwise than as stored:
    its KV is another model's.
    """
    if quantization == "none":
        return spec
    return replace(spec, fingerprint=f"{spec.fingerprint}-{quantization}")


def pinned(spec: ModelSpec, kind: str) -> ModelSpec:
    """`spec` under a fingerprint of its own, where its KV has the same bits in any batch:
    other KV must not be taken for it.

    Args:
        spec: The model.
        kind: Of GPU or of the CPU's products, and the build of the kernels, which say which bits these are.
    """
    return replace(spec, fingerprint=f"{spec.fingerprint}-deterministic-{kind}")


def choose_dtype(
    spec: ModelSpec, requested: str, device: torch.device, product: Bfloat16Product
) -> torch.dtype:
    """The dtype to hold weights and KV in.

    Args:
        spec: The model.
        requested: `auto`, or the name of a dtype. `auto` takes the checkpoint's, except on a CPU that multiplies it
            faster in float32, or only so; its weights may stay narrower (`load_decoder`).
        device: Where it will run.
        product: What multiplies bfloat16 weights on a CPU.

    Raises:
        ModelLoadError: `requested` is no dtype that pages can have.
    """
    if requested != "auto":
        if requested not in _TORCH_DTYPES:
            raise ModelLoadError(
                f"dtype {requested!r} is not supported; use auto, {', '.join(_TORCH_DTYPES)}"
            )
        return _TORCH_DTYPES[requested]
    if device.type == "cpu":
        return COMPUTED_IN[product] if spec.dtype == "bfloat16" else torch.float32
    return _TORCH_DTYPES.get(spec.dtype, torch.bfloat16)


def is_widened(spec: ModelSpec, requested: str, dtype: torch.dtype) -> bool:
    """Whether `choose_dtype` gave float32 to a model of bfloat16 unasked,
    since the processor multiplies that better.
    """
    return requested == "auto" and spec.dtype == "bfloat16" and dtype == torch.float32


def kv_layout(
    spec: ModelSpec,
    dtype: torch.dtype,
    block_tokens: int,
    drafter: ModelSpec | None = None,
    *,
    drafter_reads: int = 0,
) -> KvLayout:
    """The shape of this model's KV pages when held in `dtype`, `block_tokens` tokens to a page; a drafter's layers
    stand behind its own, as many of them in one as have room (`baton_engine.cache.arena.DrafterPages`), and behind
    them, where a drafter reads vectors of so many elements per token, those that hold these (`HiddenPages`).
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelLoadError(f"KV pages cannot be held in {name}")
    return KvLayout(
        model_fingerprint=spec.fingerprint,
        dtype=name,
        block_tokens=block_tokens,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        layers=spec.layer_names
        + (() if drafter is None else draft_layers(spec, drafter))
        + _hidden_layers(spec, drafter_reads),
        drafter="" if drafter is None else drafter.fingerprint,
    )


def draft_layers(spec: ModelSpec, drafter: ModelSpec) -> tuple[LayerName, ...]:
    """Layers of the arena that hold a drafter's KV."""
    per_layer = kv_elements(spec) // kv_elements(drafter)
    count = -(-drafter.num_layers // per_layer)
    return tuple(LayerName(f"draft.layers.{index}") for index in range(count))


def _hidden_layers(spec: ModelSpec, width: int) -> tuple[LayerName, ...]:
    count = -(-width // (2 * kv_elements(spec)))
    return tuple(LayerName(f"draft.hidden.{index}") for index in range(count))


def kv_elements(spec: ModelSpec) -> int:
    """Elements of the keys of one token in one layer."""
    return spec.num_kv_heads * spec.head_dim


def _family(config: JsonFields, path: Path, families: Mapping[str, str]) -> str:
    architectures = config.texts("architectures")
    for architecture in architectures:
        if architecture in families:
            return families[architecture]
    if not architectures and config.text("model_type", "") in families.values():
        return config.text("model_type")
    found = ", ".join(architectures) or "none named"
    raise ModelLoadError(
        f"{path}: architecture {found} is not supported; supported are {', '.join(families)}"
    )


def _rope(config: JsonFields) -> RopeSpec:
    # transformers 5 writes rope_parameters; older files have rope_theta beside an optional rope_scaling, which counts
    # where a file has both: whoever extends a context writes it, as guides of models say.
    rope = config.child("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")
    written = config.child("rope_parameters").number("rope_theta", 10000.0)
    theta = rope.number("rope_theta", config.number("rope_theta", written))
    named = "rope_type" if "rope_type" in rope else "type"
    kind = rope.text(named, "default")
    for place in (rope, config):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.wrong("partial_rotary_factor", "1")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, scaling=RopeScaling.LINEAR, factor=rope.number("factor"))
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            scaling=RopeScaling.LLAMA3,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=_original_max_position(config, rope),
        )
    raise rope.wrong(named, "default, linear or llama3, the kinds supported")


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """Of the first weights that are not quantised, as transformers has it where config.json names none."""
    stored = (tensor.dtype for tensor in checkpoint.tensors.values())
    return next((_STORED_DTYPES[name] for name in stored if name in _STORED_DTYPES), "float32")


def _original_max_position(config: JsonFields, rope: JsonFields) -> int:
    """The one beside the scaling counts before that in it, as in transformers."""
    name = "original_max_position_embeddings"
    longest = config.integer("max_position_embeddings")
    return config.integer(name) if name in config else rope.integer(name, longest)


def _windows(config: JsonFields, family: str, layers: int) -> tuple[int | None, ...]:
    is_off = family != "mistral" and not config.flag("use_sliding_window", default=False)
    is_null = config.values.get("sliding_window", _DEFAULT_WINDOW) is None
    if family == "llama" or is_off or is_null:
        return (None,) * layers
    window = config.integer("sliding_window", _DEFAULT_WINDOW)
    kinds = config.texts("layer_types")
    if kinds:
        if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise config.wrong("layer_types", f"{layers} of full_attention or sliding_attention")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if family == "mistral":
        return (window,) * layers
    first = config.integer("max_window_layers", 28, minimum=0)
    return tuple(window if index >= first else None for index in range(layers))


def _eos_token_ids(config: JsonFields, path: Path) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    if generation.exists():
        ids = read_json_fields(generation).token_ids("eos_token_id")
        if ids:
            return ids
    return config.token_ids("eos_token_id")
