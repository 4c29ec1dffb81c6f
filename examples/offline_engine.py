"""The engine offline: loads the demo model and answers some questions, without router, worker or HTTP.

    python -m examples.offline_engine "What does os.path.join do?"

An engine is told commands (`Generate`) and tells each step's tokens as columns (`SampledTokens`), on its own thread.
All questions are computed together: the scheduler batches whatever is there.
"""

import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from queue import SimpleQueue

from tokenizers import Tokenizer

from baton.config.schema import EngineConfig, ModelConfig
from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.build import BuiltEngine, build_engine
from baton_engine.messages import Failed, Generate, StepEvents
from kv_transfer.memory.arena import WorkerMemory

QUESTIONS = ("Hello", "What does os.path.join do?", "What does math.sqrt do?")
GREEDY = SamplingParams(temperature=0.0, max_tokens=128)


def demo_model() -> Path:
    """The directory of the demo model."""
    return Path(str(resources.files("baton_engine.demo"))) / "model"


def load(model: Path) -> BuiltEngine:
    """An engine over `model`, on the CPU, with 64 MiB of KV pages. Blocks while it loads."""
    return build_engine(
        ModelConfig(model=str(model)),
        EngineConfig(device="cpu", kv_cache_memory_bytes=64 << 20),
        secret=bytes(32),  # keys the prefix cache; a cluster shares one
        memory=WorkerMemory(),
        sink=None,  # no pages are handed off
        progress=lambda what, _: print(what, file=sys.stderr),
    )


def generate(engine: BuiltEngine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens drawn for each prompt, greedily. Starts the engine, and closes it.

    Raises:
        BatonError: A prompt cannot be computed.
    """
    told: SimpleQueue[StepEvents] = SimpleQueue()
    engine.host.attach(told.put)
    engine.host.start()
    output: dict[SeqId, list[int]] = {}
    for number, tokens in enumerate(prompts):
        seq_id = SeqId(str(number))
        output[seq_id] = []
        prompt = Prompt(prompt_tokens=tuple(tokens), sampling=GREEDY)
        engine.host.submit(Generate(seq_id=seq_id, prompt=prompt))
    unfinished = len(output)
    try:
        while unfinished:
            step = told.get()
            for event in step.events:
                if isinstance(event, Failed):
                    raise event.error
            if step.sampled is not None:
                columns = (step.sampled.seq_ids, step.sampled.tokens, step.sampled.finish_reasons)
                for seq_id, token, finish in zip(*columns, strict=True):
                    output[seq_id].append(token)
                    unfinished -= finish is not None
    finally:
        engine.host.close()
    return list(output.values())


def answer(questions: Sequence[str]) -> list[str]:
    """One answer to each question."""
    model = demo_model()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    chats = [f"<|user|>{question}<|end|><|assistant|>" for question in questions]
    prompts = [tokenizer.encode(chat).ids for chat in chats]
    return [tokenizer.decode(tokens) for tokens in generate(load(model), prompts)]


def main() -> None:
    """Command line: questions, or the three above."""
    questions = sys.argv[1:] or QUESTIONS
    for question, text in zip(questions, answer(questions), strict=True):
        print(f"{question}\n    {text}")


if __name__ == "__main__":
    main()
