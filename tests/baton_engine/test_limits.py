from dataclasses import replace

from baton.errors import InvalidRequestError
from baton.generation import Prompt, SamplingParams
from tests.baton_engine.scheduling_world import limits


def test_a_prompt_for_an_adapter_is_taken_only_where_the_adapter_is():
    prompt = Prompt(prompt_tokens=(1, 2, 3), sampling=SamplingParams(), adapter="sql")
    for decodes_here in (False, True):
        refused = limits().refusal(prompt, decodes_here=decodes_here)
        assert isinstance(refused, InvalidRequestError)
        assert (refused.param, refused.message) == ("model", "this worker has no adapter sql")
        having = replace(limits(), adapters=frozenset({"sql"}))
        assert having.refusal(prompt, decodes_here=decodes_here) is None
        assert limits().refusal(replace(prompt, adapter=""), decodes_here=decodes_here) is None
