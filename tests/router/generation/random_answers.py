"""Answers that random logits give under a grammar."""

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from baton.config.schema import GrammarConfig
from baton.grammar import parser_limits


def random_answer(vocabulary: LLTokenizer, grammar: str, seed: int, most: int) -> bytes | None:
    """What random logits make of a grammar; None for what has not ended after `most` tokens."""
    matcher = LLMatcher(vocabulary, grammar, limits=parser_limits(GrammarConfig()), log_level=0)
    size = vocabulary.vocab_size
    rng = np.random.default_rng(seed)
    # What ends something is likelier, so that answers end.
    ends = [vocabulary.decode_str([token])[-1:] in tuple('"}],0123') for token in range(size)]
    leaning = np.where(ends, 4.0, 0.0)
    tokens: list[int] = []
    for _ in range(most):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[:size].astype(bool)
        assert not matcher.is_error(), matcher.get_error()
        scores = np.where(allowed, leaning + rng.gumbel(size=size), -np.inf)
        token = int(scores.argmax())
        if token == vocabulary.eos_token:
            return bytes(vocabulary.decode_bytes(tokens))
        tokens.append(token)
        assert matcher.consume_token(token)
    return None
