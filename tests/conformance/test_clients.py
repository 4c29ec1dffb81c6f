"""Client libraries, each with a script of its own, against a pair of workers. A library that is not installed is
skipped; `BATON_CLIENTS_PYTHON` names the Python of an environment that has more of them.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.baton_engine.tiny_models import make_model
from tests.e2e.served import Served, serve

PYTHON = os.environ.get("BATON_CLIENTS_PYTHON", sys.executable)
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}<|assistant|>"
)
PACKAGES = {
    "openai": "openai",
    "instructor": "instructor",
    "pydantic_ai": "pydantic_ai",
    "langchain": "langchain_openai",
    "anthropic": "anthropic",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("clients")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    model = make_model(folder / "llama", "llama", max_position=4096)
    told = ("--prefill-workers", "1", "--decode-workers", "1", "--kv-cache-memory", "64MiB")
    with serve(str(model), *told, "--chat-template", str(template)) as cluster:
        yield cluster


@pytest.mark.timeout(180)
@pytest.mark.parametrize("client", PACKAGES)
def test_a_client_gets_what_it_asks_for(client: str, cluster: Served) -> None:
    found = subprocess.run(
        [PYTHON, "-c", f"import {PACKAGES[client]}"], check=False, capture_output=True, timeout=60
    )
    if found.returncode:
        pytest.skip(f"{PACKAGES[client]} is not installed")
    with cluster.client() as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
    script = Path(__file__).parent / "clients" / f"with_{client}.py"
    ran = subprocess.run(
        [PYTHON, str(script), cluster.url, model],
        check=False, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
