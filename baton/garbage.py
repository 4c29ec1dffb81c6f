"""Python's search for garbage in a process that serves: what was loaded before is never looked through again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (2_000, 5, 500)
"""Objects, and collections of the generation below, after which Python looks for cycles. It takes about a microsecond
per object that is alive and keeps all else waiting: so the younger generations are small, and the oldest, in which
large replies lie while they are written, is rarely looked through.
"""


def freeze_loaded_objects() -> None:
    """Exempts what is there now from the search, but for what is garbage already, and sets how often the rest is
    searched. For when all is loaded that stays: modules, a model, a tokenizer. Going over them again and again would
    cost a router a few percent of a core, and a worker a tenth of a second now and then.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def importing() -> Iterator[None]:
    """Within it nothing is searched: modules stay, and to go over them again and again while more are loaded is a fifth
    or more of what importing torch takes.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
