"""A model directory's tokenizer, as `transformers` reads it, without importing `transformers` (ADR 0016).

`tokenizer.json` is the tokenizer. `tokenizer_config.json` (and, in older directories, `special_tokens_map.json` and
`added_tokens.json`) add tokens to it, name some of them and may hold the chat template. A directory without
`tokenizer.json` is converted by `transformers` in a child process first. Code in a model's directory is never run.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from baton.errors import ModelLoadError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_DIRECTORY = "additional_chat_templates"

_CONVERTIBLE_FILES = ("tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json")
_NEED_TRANSFORMERS = ("fast_tokenizer_files", "fix_mistral_regex")
"""Settings of `tokenizer_config.json` by which `transformers` changes what `tokenizer.json` says."""

_SPECIAL_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LOADING_FAULTS = (OSError, ValueError, KeyError, TypeError, AttributeError)

_CONVERT = """
import sys
import transformers
source, target = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
tokenizer.save_pretrained(target)
"""
_CONVERT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedTokenizer:
    """What a model's directory says about its tokenizer.

    Attributes:
        backend: The Rust tokenizer with all added tokens.
        special_tokens: Texts of the named special tokens, such as `bos_token`; chat templates are given them.
        chat_template: The template for conversations; None if there is none.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    chat_template: str | None


def read_tokenizer(directory: Path) -> PretrainedTokenizer:
    """Reads the tokenizer of a model's directory (a hub snapshot is one). Blocks.

    Raises:
        ModelLoadError: There is none, or it cannot be read.
    """
    has_json = (directory / TOKENIZER_FILE).is_file()
    if not has_json and not any((directory / name).is_file() for name in _CONVERTIBLE_FILES):
        expected = " or ".join((TOKENIZER_FILE, *_CONVERTIBLE_FILES))
        raise ModelLoadError(f"{directory} holds no tokenizer ({expected}).")
    try:
        config = _json_object(directory / CONFIG_FILE)
        if has_json and not any(config.get(name) for name in _NEED_TRANSFORMERS):
            return _read(directory, config)
    except Exception as error:  # the Rust library raises bare `Exception` for a malformed file
        raise _unreadable(directory, str(error) or type(error).__name__) from error
    return _read_converted(directory)


def _read_converted(directory: Path) -> PretrainedTokenizer:
    """`transformers` writes a `tokenizer.json` in a process of its own: the router stays without it."""
    with tempfile.TemporaryDirectory(prefix="baton-tokenizer-") as target:
        command = [sys.executable, "-P", "-c", _CONVERT, str(directory), target]
        try:
            subprocess.run(  # noqa: S603  # this interpreter, with a script of ours
                command, check=True, capture_output=True, text=True, timeout=_CONVERT_TIMEOUT_S
            )
            return _read(Path(target), _json_object(Path(target) / CONFIG_FILE))
        except subprocess.CalledProcessError as error:
            reason = (error.stderr.strip() or "no reason given").splitlines()[-1]
        except (*_LOADING_FAULTS, subprocess.TimeoutExpired) as error:
            reason = str(error)
    raise _unreadable(
        directory,
        f"`transformers` cannot convert it to {TOKENIZER_FILE}: {reason}. Where the model's tokenizer loads, "
        f"`AutoTokenizer.from_pretrained(...).save_pretrained({str(directory)!r})` writes that file",
    )


def _unreadable(directory: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"The tokenizer in {directory} cannot be read: {' '.join(reason.split())[:600]}"
    )


def _read(directory: Path, config: Mapping[str, Any]) -> PretrainedTokenizer:
    backend = tokenizers.Tokenizer.from_file(str(directory / TOKENIZER_FILE))
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    if "added_tokens_decoder" not in config:
        config = _with_legacy_files(directory, config, backend)
    added = {int(i): _token(fields) for i, fields in config["added_tokens_decoder"].items()}
    named = {name: _token(value) for name, value in _named(config)}
    extra = [_token(value) for value in _extra(config)]
    _add_tokens(backend, added, named, extra)
    return PretrainedTokenizer(
        backend=backend,
        special_tokens={name: token.content for name, token in named.items()},
        chat_template=_chat_template(directory, config),
    )


def _with_legacy_files(
    directory: Path, config: Mapping[str, Any], backend: tokenizers.Tokenizer
) -> dict[str, Any]:
    """The settings as they are since `added_tokens_decoder`: made of the two files that came before it."""
    merged = dict(config)
    for name, value in _json_object(directory / "special_tokens_map.json").items():
        merged[name] = value | {"special": True} if "content" in value else value
    special = {_token(value).content for _, value in _named(merged)}
    special |= {_token(value).content for value in _extra(merged)}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    merged["added_tokens_decoder"] = {
        index: {"content": text, "normalized": text not in special, "special": text in special}
        for text, index in _json_object(directory / "added_tokens.json").items()
        if text not in known
    }
    return merged


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The special tokens that have a name: the usual ones, and any other `*_token` of this model."""
    for name, value in config.items():
        is_token = isinstance(value, str) or (isinstance(value, dict) and "content" in value)
        if is_token and (name in _SPECIAL_TOKENS or name.endswith("_token")):
            yield name, value
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        yield from extra.items()


def _extra(config: Mapping[str, Any]) -> list[Any]:
    """The special tokens that have none."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    return list(extra) if isinstance(extra, list) else []


def _token(value: str | Mapping[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    flags = {name: value[name] for name in _TOKEN_FLAGS if name in value}
    return AddedToken(value["content"], **flags)


def _add_tokens(
    backend: tokenizers.Tokenizer,
    added: Mapping[int, AddedToken],
    named: Mapping[str, AddedToken],
    extra: list[AddedToken],
) -> None:
    """Adds what the backend does not have, in the order in which `transformers` does: that decides their ids."""
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    adding = [token for _, token in sorted(added.items()) if repr(token) not in known]
    texts |= {token.content for token in adding}
    for token in (*named.values(), *extra):
        if token.content not in texts:
            texts.add(token.content)
            adding.append(token)
    special = {token.content for token in named.values()}
    for token in adding:
        token.special = token.special or token.content in special
    if adding:
        backend.add_tokens(adding)


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The one for conversations without tools; models that have several call it `default`. Files win over settings."""
    file = directory / TEMPLATE_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if any((directory / TEMPLATE_DIRECTORY).glob("*.jinja")):
        return None
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}
    if isinstance(source, dict):
        source = source.get("default")
    return source or None


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no such file."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise TypeError(f"{path.name} holds no JSON object")
    return found
