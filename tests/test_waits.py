"""No wait of a test for a thread or a process is without a bound: it would end by the suite's timeout,
minutes later.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
BOUNDED_OTHERWISE = {
    "tests/kv_transfer/test_ucx_session.py": "`UcxSession.join`, once the session has said that it is over",
}
RUNS = ("subprocess.run", "subprocess.check_call", "subprocess.check_output")


def unbounded(tree: ast.AST) -> Iterator[int]:
    """Lines that wait for a thread, an event or a process for as long as it takes. What is awaited,
    or handed to `soon`, is none.
    """
    for parent in ast.walk(tree):
        if isinstance(parent, ast.Await | ast.Call):
            continue
        for call in ast.iter_child_nodes(parent):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                bounded = any(keyword.arg in ("timeout", None) for keyword in call.keywords)
                waits = call.func.attr in ("join", "wait") and not call.args
                runs = call.func.attr == "communicate" or ast.unparse(call.func) in RUNS
                if (waits or runs) and not bounded:
                    yield call.lineno


def test_every_wait_for_a_thread_or_a_process_has_a_bound():
    files = {path.relative_to(TESTS.parent).as_posix(): path for path in TESTS.rglob("*.py")}
    found = {
        f"{name}:{line}"
        for name, path in files.items()
        for line in unbounded(ast.parse(path.read_text(encoding="utf-8")))
        if name not in BOUNDED_OTHERWISE
    }
    assert not found, "give them a timeout, or see tests/waits.py"
