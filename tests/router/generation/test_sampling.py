from pathlib import Path

import pytest

from baton.errors import ModelLoadError
from router.generation.sampling import SamplingDefaults, read_defaults


def test_a_model_without_recommendations_has_neutral_defaults(tmp_path: Path):
    assert read_defaults(tmp_path) == SamplingDefaults()


def test_recommendations_are_read_and_the_rest_is_ignored(tmp_path: Path):
    text = (
        '{"temperature": 1, "top_k": 20, "top_p": null, "min_p": 0.15, "eos_token_id": [1, 2],'
        ' "do_sample": true}'
    )
    (tmp_path / "generation_config.json").write_text(text)
    assert read_defaults(tmp_path) == SamplingDefaults(temperature=1.0, top_k=20, min_p=0.15)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"temperature": "hot"}', '{"top_k": 1.5}', '{"repetition_penalty": 0}'],
)
def test_recommendations_that_make_no_sense_name_their_file(text: str, tmp_path: Path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        read_defaults(tmp_path)
