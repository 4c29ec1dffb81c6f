"""Clients of a served cluster that ask again and again."""

import itertools
import threading

from tests.e2e.served import Served, eventually
from tests.waits import join

_BODY = {"model": "baton-demo", "prompt": list(range(5, 205)), "temperature": 0, "max_tokens": 24}


class Clients:
    """Threads that ask again and again until they are stopped; every answer is kept.

    Args:
        cluster: Whom they ask.
        number: Of threads.
        answers_each: After so many a thread ends by itself; None for never.
        fields: The request's own.
    """

    def __init__(
        self, cluster: Served, number: int, answers_each: int | None = None, **fields: object
    ) -> None:
        self.answers: list[tuple[int, str]] = []
        self._cluster = cluster
        self._answers_each = answers_each
        self._body = _BODY | fields
        self._enough = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        with self._cluster.client() as http:
            for _ in itertools.islice(itertools.count(), self._answers_each):
                if self._enough.is_set():
                    return
                reply = http.post("/v1/completions", json=self._body)
                self.answers.append((reply.status_code, reply.text))

    def more(self, answers: int) -> None:
        until = len(self.answers) + answers
        eventually(lambda: len(self.answers) >= until, "more answers", 60.0)

    def stop(self) -> None:
        self._enough.set()
        for thread in self._threads:
            join(thread, 60.0)
