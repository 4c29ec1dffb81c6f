"""Asks the demo model what it was trained on: `python -m baton_engine.demo.training.evaluate`."""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    BatchEncoding,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from baton_engine.demo.training.questions import MODEL_DIRECTORY, load_questions

MAX_ANSWER_TOKENS = 128
BATCH_SIZE = 50


def load_model(
    directory: Path, dtype: torch.dtype
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model, in evaluation mode, and its tokenizer, padding on the left for generation."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=dtype)
    model.eval()  # type: ignore[no-untyped-call]
    return model, AutoTokenizer.from_pretrained(directory, padding_side="left")


def answer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    *,
    sampled: bool = False,
) -> list[str]:
    """One answer to each question, each in a chat of its own; sampled means temperature 1."""
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=MAX_ANSWER_TOKENS,
        do_sample=sampled,
        top_k=0 if sampled else None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    answers: list[str] = []
    for start in range(0, len(questions), BATCH_SIZE):
        some = questions[start : start + BATCH_SIZE]
        chats = [[{"role": "user", "content": question}] for question in some]
        prompts = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        assert isinstance(prompts, BatchEncoding)
        output = model.generate(**prompts, generation_config=config)  # type: ignore[misc]
        num_prompt_tokens = prompts["input_ids"].shape[1]
        answers += tokenizer.batch_decode(output[:, num_prompt_tokens:], skip_special_tokens=True)
    return answers


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIRECTORY)
    parser.add_argument("--questions", type=int, default=50, help="how many to sample; 0 asks all")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--phrasing", default="What does {name} do?", help="how to ask")
    parser.add_argument(
        "--sampled", action="store_true", help="sample at temperature 1 instead of greedily"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    questions = load_questions(arguments.model)
    if arguments.questions:
        questions = random.Random(arguments.seed).sample(questions, arguments.questions)
    model, tokenizer = load_model(arguments.model, getattr(torch, arguments.dtype))
    asked = [
        arguments.phrasing.format(
            name=question.question.removeprefix("What does ").removesuffix(" do?")
        )
        for question in questions
    ]
    given = answer(model, tokenizer, asked, sampled=arguments.sampled)
    num_exact = 0
    for text, question, said in zip(asked, questions, given, strict=True):
        if said == question.answer:
            num_exact += 1
        else:
            print(f"{text}\n  expected: {question.answer}\n  answered: {said}")
    print(f"{num_exact} of {len(questions)} exact ({num_exact / len(questions):.1%})")


if __name__ == "__main__":
    main()
