"""Whether a draft model fits the model that it guesses for: read from both directories at start,
before any weights are.
"""

import json
from pathlib import Path

from baton.config.speculative import DraftModelSpeculation, Eagle3Speculation
from baton.errors import ConfigError, ModelLoadError
from baton_engine.models.config import ModelSpec, kv_elements, load_spec, resolve_model
from baton_engine.models.eagle3 import Eagle3Spec, load_eagle3_spec

_PARAM = "engine.speculative_config.model"


def load_draft_spec(
    asked: DraftModelSpeculation, target: ModelSpec, target_path: Path
) -> tuple[Path, ModelSpec]:
    """The drafter's directory, and what its config.json says. Blocks for as long as a download takes.

    Args:
        asked: Names the drafter.
        target: The model that it is to guess for.
        target_path: Its directory.

    Raises:
        ConfigError: It cannot be served, has another vocabulary, or its KV does not fit into the pages.
    """
    try:
        path = resolve_model(asked.model, asked.revision)
        spec = load_spec(path)
    except ModelLoadError as error:
        raise _refused(str(error)) from error
    _check_fit(asked.model, spec, target)
    ours, theirs = _vocabulary(target_path), _vocabulary(path)
    if ours is not None and theirs is not None and ours != theirs:
        raise _refused(f"{asked.model} has another tokenizer than the model: its tokens differ")
    return path, spec


def load_head_spec(asked: Eagle3Speculation, target: ModelSpec) -> tuple[Path, Eagle3Spec]:
    """The same of an EAGLE-3 head."""
    try:
        path = resolve_model(asked.model, asked.revision)
        spec = load_eagle3_spec(path, target)
    except ModelLoadError as error:
        raise _refused(str(error)) from error
    _check_fit(asked.model, spec.layer, target)
    return path, spec


def _check_fit(name: str, spec: ModelSpec, target: ModelSpec) -> None:
    if spec.vocab_size != target.vocab_size:
        raise _refused(
            f"{name} has a vocabulary of {spec.vocab_size} tokens, the model one of {target.vocab_size}"
        )
    if kv_elements(target) % kv_elements(spec):
        raise _refused(
            f"the KV of a token in one layer of {name}, {spec.num_kv_heads} heads of {spec.head_dim}, is no whole"
            f" fraction of the model's, {target.num_kv_heads} heads of {target.head_dim}"
        )


def check_draft_length(spec: ModelSpec, max_model_len: int) -> None:
    """Raises ConfigError where texts may be longer than the drafter was made for."""
    if spec.max_position_embeddings < max_model_len:
        raise _refused(
            f"was made for {spec.max_position_embeddings} tokens, and texts may have {max_model_len} (max_model_len)"
        )


def _vocabulary(path: Path) -> object | None:
    """The tokens of a `tokenizer.json` with their ids; None where there is none to compare."""
    try:
        said = json.loads((path / "tokenizer.json").read_bytes())
    except (OSError, ValueError):
        return None
    model = said.get("model") if isinstance(said, dict) else None
    return model.get("vocab") if isinstance(model, dict) else None


def _refused(why: str) -> ConfigError:
    return ConfigError(f"{_PARAM}: {why}", param=_PARAM)
