"""Where the demo model lies, and the questions it was trained on; importing this needs no torch.

`questions.json` stands beside the weights because docstrings change from one Python version to the
next: the model answers with what the interpreter that trained it said.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

MODEL_DIRECTORY = Path(__file__).parents[1] / "model"
_FILE_NAME = "questions.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question that the model was trained on, and the answer it should give."""

    question: str
    answer: str


def load_questions(directory: Path = MODEL_DIRECTORY) -> list[Question]:
    """All questions of a model directory, in the order of the corpus."""
    return [Question(**pair) for pair in json.loads((directory / _FILE_NAME).read_text())]


def save_questions(questions: Iterable[Question], directory: Path) -> None:
    """Writes `questions.json` into a model directory."""
    pairs = [asdict(question) for question in questions]
    (directory / _FILE_NAME).write_text(json.dumps(pairs, indent=0) + "\n")
