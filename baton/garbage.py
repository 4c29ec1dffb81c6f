"""Python's search for garbage in a process that serves: what was loaded before is never looked through again."""

import gc

_THRESHOLDS = (2_000, 5, 500)
"""Objects, and collections of the generation below, after which Python looks for cycles. It takes about a microsecond
per object that is alive and keeps all else waiting: so the younger generations are small, and the oldest, in which
large replies lie while they are written, is rarely looked through.
"""


def spare_what_is_loaded() -> None:
    """To be called once all is loaded that stays: modules, a model, a tokenizer. Going over them again and again would
    cost a router a few percent of every core, and a worker a tenth of a second every now and then.
    """
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
