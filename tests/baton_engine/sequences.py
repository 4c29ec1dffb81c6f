"""Sequences without a scheduler, for tests of what reads them."""

from collections.abc import Iterable

from baton.generation import Prompt, SamplingParams
from baton.ids import BlockId, SeqId
from baton_engine.messages import Generate
from baton_engine.scheduling.request import Request, Sequence


def sequence(
    tokens: Iterable[int],
    params: SamplingParams,
    *,
    seq_id: str = "s",
    samples: tuple[int, ...] = (0,),
    num_generated: int = 0,
    blocks: Iterable[int] = (),
) -> Sequence:
    """A sequence of the tokens, the last `num_generated` of which count as generated."""
    text = tuple(tokens)
    prompt_len = len(text) - num_generated
    prompt = Prompt(
        prompt_tokens=text[:prompt_len],
        output_tokens=text[prompt_len:],
        samples=samples,
        sampling=params,
    )
    request = Request(asked=Generate(seq_id=SeqId(seq_id), prompt=prompt))
    made = request.first_sequence()
    made.blocks += [BlockId(block) for block in blocks]
    return made
