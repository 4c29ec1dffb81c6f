"""How much a grammar may cost, told to llguidance the same way wherever it is called: the router checks with these
limits what a client sends, and the engine compiles with them.
"""

from llguidance import LLParserLimits

from baton.config.schema import GrammarConfig

_MAX_ITEMS_IN_ROW = 2_000
_ITEMS_OF_FUEL = 4
"""Fuel of the lexer that takes the time of one item of the parser, about: 70 and 20 per microsecond."""

CHECK_STACK_BYTES = 8 * 1024 * 1024
"""Stack on which a router checks a grammar. llguidance follows what a grammar refers to by calls within calls, 2 to 10
KiB for each level, without a limit of its own: where the stack is used up, the process ends. So this is the limit.
"""
COMPILE_STACK_BYTES = 4 * CHECK_STACK_BYTES
"""Stack on which workers compile: what a check had room for has it here, whatever compiled either. Only what is used of
it takes memory.
"""


def parser_limits(config: GrammarConfig) -> LLParserLimits:
    """The limits of one grammar. They count work, not time, so that every process refuses the same grammars."""
    return LLParserLimits(
        max_items_in_row=_MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=config.compile_fuel,
        step_lexer_fuel=config.step_fuel,
        step_max_items=config.step_fuel // _ITEMS_OF_FUEL,
        max_lexer_states=config.max_states,
        max_grammar_size=config.max_symbols,
        verbose_errors=False,
    )


def reason_of(message: str) -> str:
    """What llguidance complains of, without the excerpts that it shows."""
    lines = message.strip().splitlines() or ["no reason given"]
    errors = [line for line in lines[1:] if line.startswith("error: ")]
    return ": ".join([lines[0].rstrip(":"), *errors[:1]])[:300]
