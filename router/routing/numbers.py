"""The numbers of a worker that every decision reads, kept where C can read them too (`pricing.c`).

To Python they are ordinary attributes of `router.routing.worker_view.WorkerView` and `router.routing.forecast.Forecast`, which
say what each one means. Kept as records, a hundred workers are some dozens of cache lines and priced within microseconds;
as Python objects they are a thousand, which a busy process finds cold each time.
"""

import ctypes


class LinkNumbers(ctypes.Structure):
    """See `router.routing.bandwidth.Link`."""

    __slots__ = ()

    bytes_per_s: float
    latency_s: float

    _fields_ = (("bytes_per_s", ctypes.c_double), ("latency_s", ctypes.c_double))


class ForecastNumbers(ctypes.Structure):
    """See `Forecast`. `links_address` is that of an array of addresses of `LinkNumbers`, by slot, with 0 for what
    `fleet_link_address` stands for.
    """

    __slots__ = ()

    links_address: int
    fleet_link_address: int
    num_links: int
    prompt_s: float
    token_s: float
    attention_s: float
    step_s: float
    sequence_s: float
    context_s: float
    fetch_s: float
    fetch_token_s: float
    ready_s: float
    behind_s: float

    _fields_ = (
        ("links_address", ctypes.c_void_p),
        ("fleet_link_address", ctypes.c_void_p),
        ("num_links", ctypes.c_int64),
        ("prompt_s", ctypes.c_double),
        ("token_s", ctypes.c_double),
        ("attention_s", ctypes.c_double),
        ("step_s", ctypes.c_double),
        ("sequence_s", ctypes.c_double),
        ("context_s", ctypes.c_double),
        ("fetch_s", ctypes.c_double),
        ("fetch_token_s", ctypes.c_double),
        ("ready_s", ctypes.c_double),
        ("behind_s", ctypes.c_double),
    )

    __hash__ = object.__hash__


class WorkerNumbers(ctypes.Structure):
    """See `WorkerView`. `forecast_address` is that of its `ForecastNumbers`. All are 0 at first."""

    forecast_address: int
    progress_s: float
    heard_s: float
    kv_token_bytes: float
    slot: int
    pool_slot: int
    legs: int
    decode_sequences: int
    decode_tokens: int
    foreign_prefill_tokens: int
    foreign_sequences: int
    used_tokens: int
    reported_context_tokens: int
    capacity_tokens: int
    max_sequences: int
    can_prefill: bool

    _fields_ = (
        ("forecast_address", ctypes.c_void_p),
        ("progress_s", ctypes.c_double),
        ("heard_s", ctypes.c_double),
        ("kv_token_bytes", ctypes.c_double),
        ("slot", ctypes.c_int64),
        ("pool_slot", ctypes.c_int64),
        ("legs", ctypes.c_int64),
        ("decode_sequences", ctypes.c_int64),
        ("decode_tokens", ctypes.c_int64),
        ("foreign_prefill_tokens", ctypes.c_int64),
        ("foreign_sequences", ctypes.c_int64),
        ("used_tokens", ctypes.c_int64),
        ("reported_context_tokens", ctypes.c_int64),
        ("capacity_tokens", ctypes.c_int64),
        ("max_sequences", ctypes.c_int64),
        ("can_prefill", ctypes.c_bool),
    )

    __hash__ = object.__hash__
