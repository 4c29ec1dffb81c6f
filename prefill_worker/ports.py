"""What a prefill worker needs from outside, beside its engine and the hand-off."""

from collections.abc import Coroutine, Sequence
from typing import Protocol

from baton.generation import Prompt
from baton.ids import BlockId


class PromptStore(Protocol):
    """The pool, as somewhere to leave a computed prompt for whoever decodes it."""

    def put(self, prompt: Prompt, blocks: Sequence[BlockId]) -> Coroutine[None, None, bool]:
        """Puts the full blocks of a prompt there, ahead of what is put in the background.

        Args:
            prompt: Whose.
            blocks: All its pages, in order, which are the prompt's when this is called. Those that are handed out again
                before they were copied do not count.

        Returns:
            Whether all of them are there now. False where there is no pool or it has no room. Raises nothing.
        """
