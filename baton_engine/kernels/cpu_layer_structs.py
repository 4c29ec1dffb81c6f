"""What layers.cpp is called with, laid out as there; `baton_engine.kernels.cpu_layers` fills it in."""

import ctypes

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class Matrix(ctypes.Structure):
    """A matrix in panels, and what its product adds."""

    _fields_ = (
        ("weight", _POINTER),
        ("scales", _POINTER),
        ("bias", _POINTER),
        ("inputs", _INT),
        ("columns", _INT),
    )


class Layer(ctypes.Structure):
    """The weights of one layer, and its pages."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "query_norm", "key_norm", "post_norm")),
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
        ("pages", _POINTER),
        ("window", _INT),
    )


class Shape(ctypes.Structure):
    """What all layers have in common."""

    _fields_ = (
        *((n, _INT) for n in ("hidden", "heads", "kv_heads", "head_dim", "block_tokens", "width")),
        *((name, ctypes.c_float) for name in ("norm_eps", "head_norm_eps", "scale")),
        ("int8", ctypes.c_int32),
    )


class Step(ctypes.Structure):
    """A step's tokens."""

    _fields_ = (
        *((name, _INT) for name in ("tokens", "rows", "table_width")),
        *((name, _POINTER) for name in ("cos", "sin", "slots", "query_starts")),
        *((name, _POINTER) for name in ("context_lens", "block_tables", "x", "residual")),
        ("logits", _INT),
        *((name, _POINTER) for name in ("logit_tokens", "logit_x", "logit_residual")),
    )
