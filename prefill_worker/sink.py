"""Where the engine tells, on its own thread and between two layers, which pages are complete."""

from collections.abc import Callable

from baton_engine.ports import LayerReady


class TransferSink:
    """Passes the engine's exports on to the sending half (implements `baton_engine.ports.LayerSink`).

    Made before the engine, which needs it, and bound when the worker starts; until then nothing is prefilled.
    """

    def __init__(self) -> None:
        self._post: Callable[[LayerReady], None] | None = None

    def bind(self, post: Callable[[LayerReady], None]) -> None:
        """From now on `post` gets every report; it must neither block nor raise."""
        self._post = post

    def save_kv_layer(self, layer: LayerReady) -> None:
        """See `LayerSink`."""
        if self._post is not None:
            self._post(layer)
