"""NIXL's agent and where its Python package is: the one place of the backend `nixl` (`nixl.py`) that loads it."""

import importlib
import logging
import os
import secrets
import threading
from types import ModuleType
from typing import Any

from baton.errors import TransferError
from kv_transfer.memory import ArenaSpan

MODULES = ("nixl_cu12", "nixl_cu13")


class NixlAgent:
    """One agent of NIXL with one registered arena; made at first use, for that takes a while.

    Args:
        arena: To register.
        own_thread: Whether NIXL drives its transport by itself, with a thread that never sleeps and costs a core. Otherwise
            something is done only while somebody polls a write, or calls `drive`.
    """

    def __init__(self, arena: ArenaSpan, *, own_thread: bool = False) -> None:
        self.arena = arena
        self._own_thread = own_thread
        self._lock = threading.Lock()
        self._agent: Any = None

    def get(self) -> Any:
        """The agent itself, whose API is typed nowhere. Thread-safe.

        Raises:
            TransferError: NIXL is not there, or refuses the memory.
        """
        with self._lock:
            if self._agent is None:
                self._agent = self._make()
            return self._agent

    def drive(self) -> None:
        """Does what peers wait for."""
        self.get().get_new_notifs()

    def _make(self) -> Any:
        try:
            nixl = load()
            config = nixl.nixl_agent_config(
                backends=["UCX"],
                enable_prog_thread=self._own_thread,
                # Each peer has a thread of its own here, and all of them share the agent.
                sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            agent = nixl.nixl_agent(f"baton-{secrets.token_hex(8)}", config)
            whole = (self.arena.address, self.arena.size_bytes, self.arena.device or 0, "")
            agent.register_memory([whole], memory_kind(self.arena.device))
        except Exception as error:
            raise TransferError(f"NIXL cannot be used: {error!r}") from error
        return agent


def load() -> ModuleType:
    """NIXL's Python package, whichever CUDA generation it is built for.

    Raises:
        ImportError: None is installed.
    """
    for name in MODULES:
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            # It greets on standard output, which is no place for a library.
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return found
    raise ImportError("no NIXL: pip install baton-serve[nixl]")


def memory_kind(device: int | None) -> str:
    """What NIXL calls the memory of a GPU, or the host's."""
    return "DRAM" if device is None else "VRAM"
