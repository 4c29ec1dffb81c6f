"""`engine.speculative_config`: whether and how decodes are speculated, in vLLM's JSON names."""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.errors import ConfigError

_OTHER_METHODS = ("suffix", "eagle", "medusa", "mlp_speculator", "mtp")
"""Of vLLM's, which this engine has not got."""

_FIELDS = {
    "ngram": ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": ("method", "num_speculative_tokens", "model", "revision"),
    "eagle3": ("method", "num_speculative_tokens", "model", "revision"),
}
METHODS = tuple(_FIELDS)
_PATH = "engine.speculative_config"
MOST_DRAFTS = 32
"""Of one sequence in one step. What is worth computing is far less; it bounds rows and pages of a step."""

LONGEST_NGRAM = 64
_DEFAULT_NGRAM = 5


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


Speculation = NgramSpeculation | DraftModelSpeculation | Eagle3Speculation


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


def _number(config: Mapping[str, object], name: str, most: int) -> int | None:
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise _refused(name, f"must be a whole number from 1 to {most}, got {value!r}")
    return value


def _text(config: Mapping[str, object], name: str) -> str | None:
    value = config.get(name)
    if value is not None and not isinstance(value, str):
        raise _refused(name, f"must be a text, got {value!r}")
    return value


def _refused(name: str, why: str) -> ConfigError:
    path = f"{_PATH}.{name}"
    return ConfigError(f"{path}: {why}", param=path)
