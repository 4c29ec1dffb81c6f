"""Every `InvariantError` of the product carries the story of what it is about, or there is a reason why it cannot."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    *(
        "baton",
        "baton_cluster",
        "baton_engine",
        "baton_worker",
        "decode_worker",
        "kv_transfer",
        "kvpool",
    ),
    *("prefill_worker", "router"),
)
COUNTS = "a count over all, which is of no request, block or worker"
NUMBERS = "a number that was learned or configured; it has no story"
WRAPPED = "`Dispatcher.handle` gives it the story of the event's request"
WITHOUT: dict[str, str] = {
    "baton/fit.py": NUMBERS,
    "baton/rpc/block_feed.py": "a message that contradicts the one before it; the sender has the block's story",
    "baton_engine/cache/blocks.py": COUNTS,
    "baton_engine/cache/prefix_tree.py": COUNTS,
    "baton_engine/host.py": "a step without a listener",
    "baton_engine/scheduling/in_flight.py": "steps keep no story",
    "baton_engine/scheduling/queues.py": COUNTS,
    "baton_engine/scheduling/scheduler.py": "the order of commands and steps",
    "baton_engine/scheduling/step_cost.py": NUMBERS,
    "kv_transfer/memory/arena.py": "the order in which a worker is put together",
    "kvpool/directory/memory.py": COUNTS,
    "kvpool/node/accounts.py": COUNTS,
    "kvpool/node/block_store.py": COUNTS,
    "kvpool/node/ledger.py": COUNTS,
    "kvpool/peers/receiver.py": "what a session between nodes never offers",
    "router/admission/controller.py": COUNTS,
    "router/admission/queue.py": COUNTS
    + "; the controller has looked, with the story, before it queues a request twice",
    "router/deadlines.py": COUNTS,
    "router/dispatch/attempt.py": WRAPPED,
    "router/dispatch/request.py": WRAPPED,
    "router/dispatch/retry.py": COUNTS,
    "router/routing/columns.py": COUNTS,
    "router/generation/guardrails.py": "the order of a request's steps",
    "router/routing/forecast.py": NUMBERS,
    "router/routing/index.py": COUNTS,
    "router/routing/pools.py": COUNTS,
    "router/routing/table.py": COUNTS,
}


def without_a_story(path: Path) -> Iterator[int]:
    """Lines where an `InvariantError` is made that carries none."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            told = {keyword.arg for keyword in node.keywords}
            if node.func.id == "InvariantError" and "story" not in told:
                yield node.lineno


@pytest.mark.parametrize("package", PACKAGES)
def test_an_invariant_error_carries_the_story_of_what_it_is_about(package: str):
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / package).rglob("*.py")}
    found = {name for name, path in files.items() if any(without_a_story(path))}
    assert found == {name for name in WITHOUT if name in files}


def test_every_file_that_needs_a_reason_is_there():
    assert not [name for name in WITHOUT if not (ROOT / name).exists()]
