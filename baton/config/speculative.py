"""`engine.speculative_config`: whether and how decodes are speculated, in vLLM's JSON names."""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.errors import ConfigError

_OTHER_METHODS = ("eagle", "medusa", "mlp_speculator", "mtp")
"""Of vLLM's, which this engine has not got."""

_FIELDS = {
    "ngram": ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    "suffix": (
        "method",
        "num_speculative_tokens",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "draft_model": ("method", "num_speculative_tokens", "model", "revision"),
    "eagle3": ("method", "num_speculative_tokens", "model", "revision"),
}
METHODS = tuple(_FIELDS)
_PATH = "engine.speculative_config"
MOST_DRAFTS = 32
"""Of one sequence in one step. What is worth computing is far less; it bounds rows and pages of a step."""

LONGEST_NGRAM = 64
_DEFAULT_NGRAM = 5

DEEPEST_TREE = 256
MOST_CACHED_REQUESTS = 1_000_000
_DEFAULT_DEPTH, _DEFAULT_CACHED_REQUESTS = 24, 10_000
_HIGHEST_FACTOR, _DEFAULT_FACTOR, _DEFAULT_PROBABILITY = 32.0, 1.0, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSpeculation:
    """Drafts are what followed the text's last n-gram where that stood before (Saxena 2023, prompt lookup decoding).

    Attributes:
        num_speculative_tokens: The most drafts of a sequence in a step.
        prompt_lookup_max: Tokens of the longest n-gram that is looked up.
        prompt_lookup_min: Those of the shortest; a longer one that is found goes first.
    """

    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixSpeculation:
    """Drafts are what most often followed the text's last tokens, in itself and in other outputs of its scope
    (SuffixDecoding, Oliaro et al. 2024).

    Attributes:
        num_speculative_tokens: The most drafts of a sequence in a step.
        max_tree_depth: What the tokens that match and the drafts behind them come to at most.
        max_cached_requests: Outputs that a worker keeps; 0 for none, so that a text is looked up in itself alone.
        max_spec_factor: Drafts per token that matches.
        min_token_prob: A draft that is less likely than this, with those before it, is not made.
    """

    num_speculative_tokens: int
    max_tree_depth: int = _DEFAULT_DEPTH
    max_cached_requests: int = _DEFAULT_CACHED_REQUESTS
    max_spec_factor: float = _DEFAULT_FACTOR
    min_token_prob: float = _DEFAULT_PROBABILITY


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelSpeculation:
    """Drafts are drawn by a second, smaller model of the same vocabulary (Leviathan et al. 2023).

    Attributes:
        num_speculative_tokens: The most drafts of a sequence in a step.
        model: A directory, or an id of the Hugging Face hub.
        revision: Of the hub's model; None for its main one.
    """

    num_speculative_tokens: int
    model: str
    revision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Speculation:
    """Drafts are drawn by one layer that reads the model's hidden states (EAGLE-3, Li et al. 2025).

    Attributes:
        num_speculative_tokens: The most drafts of a sequence in a step.
        model: A directory, or an id of the Hugging Face hub, of vLLM's and SGLang's format.
        revision: Of the hub's model; None for its main one.
    """

    num_speculative_tokens: int
    model: str
    revision: str | None = None


Speculation = NgramSpeculation | SuffixSpeculation | DraftModelSpeculation | Eagle3Speculation


def read_speculative(config: Mapping[str, object]) -> Speculation | None:
    """What `engine.speculative_config` asks for; None where it is empty.

    Raises:
        ConfigError: It asks for what there is not. `param` is the field.
    """
    if not config:
        return None
    method = config.get("method")
    if method in _OTHER_METHODS:
        raise _refused("method", f"{method} is not built, only {', '.join(METHODS)}")
    if not isinstance(method, str) or method not in METHODS:
        raise _refused("method", f"must be one of {', '.join(METHODS)}")
    for name in config:
        if name not in _FIELDS[method]:
            raise _refused(name, f"is no setting of the method {method}")
    num_drafts = _number(config, "num_speculative_tokens", MOST_DRAFTS)
    if method == "suffix":
        return _suffix(config, num_drafts)
    if num_drafts is None:
        raise _refused("num_speculative_tokens", "must be given")
    if method == "ngram":
        return _ngram(config, num_drafts)
    model = _text(config, "model")
    if not model:
        raise _refused("model", "must be given")
    revision = _text(config, "revision")
    kind = Eagle3Speculation if method == "eagle3" else DraftModelSpeculation
    return kind(num_speculative_tokens=num_drafts, model=model, revision=revision)


def _ngram(config: Mapping[str, object], num_drafts: int) -> NgramSpeculation:
    longest = _number(config, "prompt_lookup_max", LONGEST_NGRAM)
    shortest = _number(config, "prompt_lookup_min", LONGEST_NGRAM)
    longest = longest or shortest or _DEFAULT_NGRAM
    shortest = shortest or longest
    if shortest > longest:
        raise _refused("prompt_lookup_min", f"must not be above prompt_lookup_max ({longest})")
    return NgramSpeculation(
        num_speculative_tokens=num_drafts, prompt_lookup_max=longest, prompt_lookup_min=shortest
    )


def _suffix(config: Mapping[str, object], num_drafts: int | None) -> SuffixSpeculation:
    depth = _number(config, "suffix_decoding_max_tree_depth", DEEPEST_TREE, least=2)
    cached = _number(config, "suffix_decoding_max_cached_requests", MOST_CACHED_REQUESTS, least=0)
    factor = _share(config, "suffix_decoding_max_spec_factor", _HIGHEST_FACTOR)
    probability = _share(config, "suffix_decoding_min_token_prob", 1.0)
    depth = _DEFAULT_DEPTH if depth is None else depth
    return SuffixSpeculation(
        num_speculative_tokens=num_drafts or min(depth, MOST_DRAFTS),
        max_tree_depth=depth,
        max_cached_requests=_DEFAULT_CACHED_REQUESTS if cached is None else cached,
        max_spec_factor=_DEFAULT_FACTOR if factor is None else factor,
        min_token_prob=_DEFAULT_PROBABILITY if probability is None else probability,
    )


def _number(config: Mapping[str, object], name: str, most: int, *, least: int = 1) -> int | None:
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _refused(name, f"must be a whole number from {least} to {most}, got {value!r}")
    return value


def _share(config: Mapping[str, object], name: str, most: float) -> float | None:
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
        raise _refused(name, f"must be a number from 0 to {most:g}, got {value!r}")
    return float(value)


def _text(config: Mapping[str, object], name: str) -> str | None:
    value = config.get(name)
    if value is not None and not isinstance(value, str):
        raise _refused(name, f"must be a text, got {value!r}")
    return value


def _refused(name: str, why: str) -> ConfigError:
    path = f"{_PATH}.{name}"
    return ConfigError(f"{path}: {why}", param=path)
