"""Children that render come and go; what they are asked is answered or refused."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from baton.errors import ConfigError, InvalidRequestError, UnavailableError
from router.templates.renderer import Conversation, TemplateRenderer, read_template
from tests.waits import eventually

SOURCE = (
    "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}{{ bos_token }}{{ messages[0].content }}{{ more }}"
)


def saying(text: str, **arguments: object) -> Conversation:
    return Conversation(messages=[{"role": "user", "content": text}], arguments=arguments)


@pytest.fixture
def renderer() -> Iterator[TemplateRenderer]:
    made = TemplateRenderer(SOURCE, {"bos_token": "<s>"}, limit_s=20.0)
    yield made
    made.close()


def children() -> list[psutil.Process]:
    return [c for c in psutil.Process().children() if "sandbox.py" in " ".join(c.cmdline())]


def test_text_and_arguments_come_back_as_they_were(renderer: TemplateRenderer):
    text = "ü你\U0001f600\0\u2028 {{ 7 * 7 }}"
    assert renderer.render(saying(text, more=[1.5, None, "é"])) == f"<s>{text}[1.5, None, 'é']"
    assert renderer.render(saying("x", more=2**80)) == f"<s>x{2**80}"
    long = "x" * 3_000_000
    assert renderer.render(saying(long)) == f"<s>{long}"


def test_no_child_is_started_before_it_is_needed_and_one_serves_all_that_follow(
    renderer: TemplateRenderer,
):
    assert children() == []
    for _ in range(5):
        renderer.render(saying("hi"))
        assert len(children()) == 1


def test_two_at_once_have_a_child_each(renderer: TemplateRenderer):
    renderer.render(saying("hi"))
    with ThreadPoolExecutor(1) as pool:
        looping = pool.submit(renderer.render, saying("loop"))
        (first,) = children()
        eventually(lambda: first.status() == psutil.STATUS_RUNNING)
        assert renderer.render(saying("hi")) == "<s>hi"
        assert len(children()) == 2
        first.kill()
        with pytest.raises(InvalidRequestError, match="refuses these messages"):
            looping.result()
    assert len(children()) == 1


def test_a_child_that_was_killed_is_replaced(renderer: TemplateRenderer):
    renderer.render(saying("hi"))
    (first,) = children()
    os.kill(first.pid, signal.SIGKILL)
    first.wait(timeout=30)
    assert renderer.render(saying("hi")) == "<s>hi"


def test_where_no_child_can_be_started_that_is_said_and_the_next_conversation_is_rendered(
    renderer: TemplateRenderer, monkeypatch
):
    with monkeypatch.context() as context:
        context.setattr("sys.executable", "/nowhere/python")  # as where it is being replaced
        descriptors = psutil.Process().num_fds()
        with pytest.raises(UnavailableError, match="could be started: no such file or directory"):
            renderer.render(saying("hi"))
        assert psutil.Process().num_fds() == descriptors
    assert "hi" in renderer.render(saying("hi"))


def test_closing_leaves_no_child():
    renderer = TemplateRenderer(SOURCE, {}, limit_s=20.0)
    renderer.render(saying("hi"))
    renderer.close()
    assert children() == []


def test_closing_ends_a_child_that_renders():
    renderer = TemplateRenderer(SOURCE, {}, limit_s=600.0)
    with ThreadPoolExecutor(1) as pool:
        looping = pool.submit(renderer.render, saying("loop"))
        eventually(lambda: bool(children()))
        renderer.close()
        with pytest.raises(UnavailableError, match="closed"):
            looping.result()
    assert children() == []


@pytest.mark.timeout(60)
def test_a_child_that_loops_does_not_outlive_its_parent_for_long():
    script = (
        "from router.templates.renderer import Conversation, TemplateRenderer\n"
        f"renderer = TemplateRenderer({SOURCE!r}, {{}}, limit_s=1.0)\n"
        "renderer.render(Conversation(messages=[{'role': 'user', 'content': 'hi'}]))\n"
        "print('ready', flush=True)\n"
        "renderer.render(Conversation(messages=[{'role': 'user', 'content': 'loop'}]))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    (child,) = psutil.Process(parent.pid).children()
    eventually(lambda: child.status() == psutil.STATUS_RUNNING)
    parent.kill()
    parent.wait(timeout=30)
    parent.stdout.close()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()


def test_a_child_can_open_no_file_and_sees_no_environment(renderer: TemplateRenderer, monkeypatch):
    monkeypatch.setenv("BATON_SECRET", "s3cret")
    renderer.render(saying("hi"))
    (child,) = children()
    assert "BATON_SECRET" not in child.environ()
    assert child.rlimit(psutil.RLIMIT_NOFILE) == (3, 3)
    assert child.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert child.num_fds() == 3


def test_an_operators_template_is_read_from_a_file_or_is_one_itself(tmp_path: Path):
    file = tmp_path / "talk.jinja"
    file.write_text("{{ messages[0].content }}")
    assert read_template(str(file)) == "{{ messages[0].content }}"
    assert read_template("{{ bos_token }}") == "{{ bos_token }}"
    assert read_template("") is None


@pytest.mark.parametrize(
    "given", ["no/such/file.jinja", "~nobody-of-this-name/t.jinja", "{% if %}", "{{ unclosed"]
)
def test_what_is_no_template_is_refused_at_start(given: str):
    with pytest.raises(ConfigError) as caught:
        read_template(given)
    assert caught.value.param == "router.chat_template"


def test_a_file_that_is_no_text_is_refused_at_start(tmp_path: Path):
    (tmp_path / "talk.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError):
        read_template(str(tmp_path / "talk.jinja"))
