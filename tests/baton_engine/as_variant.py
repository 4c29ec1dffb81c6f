"""A pytest plugin: the CPU kernels are those built for a lesser processor, which `BATON_TESTS_VARIANT` names.

`python -m pytest -p tests.baton_engine.as_variant tests/baton_engine/test_cpu_matmul.py`
"""

import os

from baton import native


def pytest_configure() -> None:
    """Before anything is loaded: hides the faster variants."""
    names = [variant.name for variant in native.VARIANTS]
    native.VARIANTS = native.VARIANTS[names.index(os.environ["BATON_TESTS_VARIANT"]) :]
