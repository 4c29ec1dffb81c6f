"""An engine as a worker builds it, with a memory of its own and nobody to hand KV off to."""

from pathlib import Path

from baton.config.schema import EngineConfig, ModelConfig
from baton_engine.build import BuiltEngine, build_engine
from kv_transfer.memory.arena import WorkerMemory


def built_engine(model: Path, config: EngineConfig, *, max_model_len: int = 256) -> BuiltEngine:
    """Close its `host`."""
    return build_engine(
        ModelConfig(model=str(model), max_model_len=max_model_len),
        config,
        secret=bytes(32),
        memory=WorkerMemory(),
        sink=None,
        progress=lambda _what, _fraction: None,
    )
