"""What is read from a model's directory is what `transformers` reads from it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from baton.errors import ModelLoadError
from baton.pretrained import PretrainedTokenizer, read_tokenizer
from tests.router.text.tiny_tokenizers import byte_fallback, byte_level, save

Change = Callable[[Path], None]


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "tokenizer_config.json").read_text())
    return found


def configure(directory: Path, **settings: Any) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(config_of(directory) | settings))


def drop(directory: Path, *names: str) -> None:
    config = config_of(directory)
    for name in names:
        config.pop(name, None)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def as_saved(directory: Path) -> None:
    """Nothing is changed."""


def without_settings(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()


def named_tokens(directory: Path) -> None:
    configure(directory, bos_token="<|system|>", pad_token="<|pad|>", image_token="<|image|>")


def named_as_objects(directory: Path) -> None:
    token = {"__type": "AddedToken", "content": "<|begin|>", "lstrip": True, "normalized": False}
    configure(directory, bos_token=token, unk_token=None)


def extra_tokens(directory: Path) -> None:
    configure(directory, extra_special_tokens=["<|one|>", "<|two|>"])


def extra_tokens_by_their_old_name(directory: Path) -> None:
    configure(directory, additional_special_tokens=["<|one|>", "<|user|>"])


def extra_tokens_with_names(directory: Path) -> None:
    configure(directory, extra_special_tokens={"video_token": "<|video|>"})


def added_tokens(directory: Path) -> None:
    decoder = config_of(directory).get("added_tokens_decoder", {})
    size = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    plain = {"lstrip": False, "rstrip": True, "single_word": False, "normalized": False}
    decoder[str(size)] = {"content": "<tool>", "special": False} | plain
    decoder[str(size + 1)] = {"content": "<|late|>", "special": True} | plain
    configure(directory, added_tokens_decoder=decoder)


def legacy_files(directory: Path) -> None:
    drop(directory, "added_tokens_decoder", "eos_token", "bos_token")
    size = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    (directory / "added_tokens.json").write_text(json.dumps({"<tool>": size, "<|pad|>": size + 1}))
    (directory / "special_tokens_map.json").write_text(
        json.dumps(
            {
                "eos_token": {
                    "content": "<|end|>",
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                },
                "pad_token": "<|pad|>",
                "additional_special_tokens": ["<|one|>"],
            }
        )
    )


def special_tokens_are_split(directory: Path) -> None:
    configure(directory, split_special_tokens=True)


def begins_with_a_token(directory: Path) -> None:
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    first = backend.get_added_tokens_decoder()[0].content
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, 0)]
    )
    backend.save(str(directory / "tokenizer.json"))
    configure(directory, add_bos_token=False, bos_token=first)


def template_in_settings(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    configure(directory, chat_template="{{ messages }}")


def several_templates_in_settings(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    named = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    configure(directory, chat_template=[{"name": n, "template": t} for n, t in named.items()])


def template_in_both(directory: Path) -> None:
    configure(directory, chat_template="{{ 'not this one' }}")


def several_template_files(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")


def template_files_without_a_default(directory: Path) -> None:
    several_template_files(directory)
    (directory / "chat_template.jinja").unlink()
    configure(directory, chat_template="{{ 'not this one' }}")


def no_template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()


CHANGES: list[Change] = [
    as_saved,
    without_settings,
    named_tokens,
    named_as_objects,
    extra_tokens,
    extra_tokens_by_their_old_name,
    extra_tokens_with_names,
    added_tokens,
    legacy_files,
    special_tokens_are_split,
    begins_with_a_token,
    template_in_settings,
    several_templates_in_settings,
    template_in_both,
    several_template_files,
    template_files_without_a_default,
    no_template,
]
TEXTS = [
    "Hello world <|user|>hi<|end|> <|one|><|two|> <|pad|>x <|image|><|video|>",
    "<tool>  y <|late|> <|begin|> z hi hi abc é\n\t你好 \U0001f600 <unk><s></s>",
]


def of_transformers(directory: Path) -> PretrainedTokenizer:
    oracle = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    template = oracle.chat_template
    return PretrainedTokenizer(
        backend=oracle.backend_tokenizer,
        special_tokens=oracle.special_tokens_map,
        chat_template=template.get("default") if isinstance(template, dict) else template,
    )


def all_but_processing(backend: Tokenizer) -> dict[str, Any]:
    """Everything that is stored of a tokenizer but what it adds around a text: of that the results are compared."""
    found: dict[str, Any] = json.loads(backend.to_str())
    return {key: found[key] for key in found if key != "post_processor"}


def ids(backend: Tokenizer, text: str, special: bool) -> list[int]:
    return backend.encode(text, add_special_tokens=special).ids


@pytest.mark.parametrize("family", [byte_level, byte_fallback])
@pytest.mark.parametrize("change", CHANGES)
def test_it_is_what_transformers_reads(
    family: Callable[[], Tokenizer], change: Change, tmp_path: Path
):
    change(save(family(), tmp_path))
    read, expected = read_tokenizer(tmp_path), of_transformers(tmp_path)
    assert read.special_tokens == expected.special_tokens
    assert read.chat_template == expected.chat_template
    assert all_but_processing(read.backend) == all_but_processing(expected.backend)
    for text in TEXTS:
        for special in (False, True):
            assert ids(read.backend, text, special) == ids(expected.backend, text, special)


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("model")
    added_tokens(save(request.param(), directory))
    return read_tokenizer(directory).backend, of_transformers(directory).backend


@settings(max_examples=200)
@given(text=st.text() | st.lists(st.sampled_from(["<tool>", " ", "hi", "<|late|>"])).map("".join))
def test_any_text_has_the_tokens_that_transformers_gives_it(pair, text: str):
    read, expected = pair
    found = ids(read, text, special=True)
    assert found == ids(expected, text, special=True)
    for skip in (False, True):
        decoded = read.decode(found, skip_special_tokens=skip)
        assert decoded == expected.decode(found, skip_special_tokens=skip)


def test_what_only_transformers_can_read_is_converted_in_another_process(tmp_path: Path):
    save(byte_level(), tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(stored["model"]["vocab"]))
    merges = [" ".join(merge) for merge in stored["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    configure(tmp_path, tokenizer_class="GPT2Tokenizer", bos_token="<|end|>", unk_token="<|end|>")
    read, expected = read_tokenizer(tmp_path), of_transformers(tmp_path)
    assert read.chat_template == expected.chat_template is not None
    for text in TEXTS:
        assert ids(read.backend, text, special=True) == ids(expected.backend, text, special=True)


def test_what_cannot_be_converted_says_how_it_could_be(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json.*save_pretrained") as caught:
        read_tokenizer(tmp_path)
    assert "\n" not in caught.value.message
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "y"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {"text": "y"}}}'),
        ("special_tokens_map.json", "[]"),
    ],
)
def test_damaged_files_are_one_clear_line(name: str, text: str, tmp_path: Path):
    legacy_files(save(byte_level(), tmp_path))
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelLoadError) as caught:
        read_tokenizer(tmp_path)
    assert str(tmp_path) in caught.value.message
    assert "\n" not in caught.value.message
