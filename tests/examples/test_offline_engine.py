import sys

import pytest

from examples import offline_engine


def test_it_answers_what_the_demo_model_knows(monkeypatch, capsys: pytest.CaptureFixture[str]):
    question = "What does os.path.join do?"
    monkeypatch.setattr(sys, "argv", ["offline_engine", question])
    offline_engine.main()
    asked, answered = capsys.readouterr().out.splitlines()
    assert asked == question
    assert "Join two or more pathname components" in answered
