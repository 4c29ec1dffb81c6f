import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def home() -> Iterator[Path]:
    # Not tmp_path, which can be too long for a Unix socket.
    with tempfile.TemporaryDirectory(prefix="baton-test-") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Commands configure the logging of their process, which is that of all tests here."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)
