"""Trains the demo model: `python -m baton_engine.demo.training.train [--out DIR] [--minutes N] [--seed 0]`.

A small Llama learns by heart what the standard library's docstrings say first. The result is an
ordinary Hugging Face directory, stored in bfloat16. The same seed, interpreter, libraries, machine
and thread count give the same weights, unless the time limit cuts the run short: then the learning
rate comes down sooner, so that what was learnt still settles.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from baton_engine.demo.training.conversations import PHRASINGS, SMALL_TALK, epoch
from baton_engine.demo.training.corpus import Entry, entries
from baton_engine.demo.training.questions import MODEL_DIRECTORY, Question, save_questions
from baton_engine.demo.training.tokenizer import (
    END_OF_TURN,
    PADDING,
    encode_conversation,
    save_tokenizer,
    special_token_id,
    train_tokenizer,
)

MAX_POSITIONS = 4096
VOCAB_SIZE = 2048
IGNORED_LABEL = -100
PROGRESS_INTERVAL_S = 10.0
# Conversations of similar length share a batch; they are sought among this many batches' worth.
BATCHES_PER_BUCKET = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Every setting that decides what the weights become."""

    num_epochs: int
    limit_s: float
    seed: int
    unhurried_share: float = 0.8
    batch_size: int = 16
    peak_learning_rate: float = 2e-3
    warmup_share: float = 0.05
    final_learning_rate_share: float = 0.01
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0

    def progress(self, done: float, elapsed_s: float) -> float:
        """Where the learning rate's schedule stands, from 0 to 1, after the share `done` of the steps.

        The clock has no say, or no two runs would agree, until little of the time limit is left:
        from then on it hurries the schedule to its end.
        """
        lateness = (elapsed_s / self.limit_s - self.unhurried_share) / (1 - self.unhurried_share)
        return done + (1 - done) * min(1.0, max(0.0, lateness))

    def learning_rate(self, progress: float) -> float:
        """Linear warm-up, then a cosine; `progress` goes from 0 to 1 over the run."""
        if progress < self.warmup_share:
            return self.peak_learning_rate * progress / self.warmup_share
        after_warmup = min(1.0, (progress - self.warmup_share) / (1 - self.warmup_share))
        cosine = (1 + math.cos(math.pi * after_warmup)) / 2
        floor = self.final_learning_rate_share
        return self.peak_learning_rate * (floor + (1 - floor) * cosine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Padded conversations; both tensors are int64 `[num_conversations, num_tokens]`.

    There is no attention mask: under causal attention nothing looks at the padding on the right.
    """

    token_ids: torch.Tensor
    labels: torch.Tensor


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """The untrained model, about 3.5 million parameters, in float32."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=special_token_id(tokenizer, END_OF_TURN),
        pad_token_id=special_token_id(tokenizer, PADDING),
    )
    return LlamaForCausalLM(config)


def build_tokenizer(known: Sequence[Entry]) -> Tokenizer:
    """A tokenizer for everything that the training conversations may contain."""
    texts = [text for entry in known for text in (entry.question, entry.answer)]
    texts += [text for answer, questions in SMALL_TALK.items() for text in (answer, *questions)]
    return train_tokenizer([*texts, *PHRASINGS], VOCAB_SIZE)


def train(
    model: LlamaForCausalLM, tokenizer: Tokenizer, known: Sequence[Entry], recipe: Recipe
) -> None:
    """Trains `model` in place. Blocks until the last epoch or the time limit; prints progress."""
    rng = random.Random(recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.98), weight_decay=recipe.weight_decay
    )
    model.train()
    started_s = printed_s = time.monotonic()
    for epoch_index in range(recipe.num_epochs):
        batches = list(_batches(tokenizer, known, recipe.batch_size, rng))
        for batch_index, batch in enumerate(batches):
            elapsed_s = time.monotonic() - started_s
            done = (epoch_index + batch_index / len(batches)) / recipe.num_epochs
            progress = recipe.progress(done, elapsed_s)
            if progress >= 1:
                print(f"time limit reached in epoch {epoch_index}", flush=True)
                return
            loss = _step(model, optimizer, batch, recipe, progress)
            if time.monotonic() - printed_s >= PROGRESS_INTERVAL_S:
                printed_s = time.monotonic()
                print(
                    f"{progress:6.1%}  epoch {epoch_index:3}  loss {loss:.4f}  {elapsed_s:5.0f} s",
                    flush=True,
                )


def _step(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    recipe: Recipe,
    progress: float,
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = recipe.learning_rate(progress)
    loss = model(input_ids=batch.token_ids, labels=batch.labels, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_gradient_norm)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _batches(
    tokenizer: Tokenizer, known: Sequence[Entry], batch_size: int, rng: random.Random
) -> Iterator[Batch]:
    encoded = [encode_conversation(tokenizer, conversation) for conversation in epoch(known, rng)]
    bucket_size = batch_size * BATCHES_PER_BUCKET
    for bucket_start in range(0, len(encoded), bucket_size):
        bucket = sorted(
            encoded[bucket_start : bucket_start + bucket_size], key=lambda one: len(one[0])
        )
        starts = list(range(0, len(bucket), batch_size))
        rng.shuffle(starts)
        for start in starts:
            yield _pad(bucket[start : start + batch_size], special_token_id(tokenizer, PADDING))


def _pad(members: Sequence[tuple[Sequence[int], Sequence[bool]]], pad_id: int) -> Batch:
    num_tokens = max(len(token_ids) for token_ids, _ in members)
    token_ids = torch.full((len(members), num_tokens), pad_id)
    labels = torch.full((len(members), num_tokens), IGNORED_LABEL)
    for row, (ids, is_target) in enumerate(members):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.where(
            torch.tensor(is_target), torch.tensor(ids), IGNORED_LABEL
        )
    return Batch(token_ids=token_ids, labels=labels)


def save(
    model: LlamaForCausalLM, tokenizer: Tokenizer, known: Sequence[Entry], directory: Path
) -> None:
    """Writes the Hugging Face directory, weights in bfloat16, and the questions it learnt."""
    directory.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.bfloat16().save_pretrained(directory)
    save_tokenizer(tokenizer, directory, MAX_POSITIONS)
    save_questions(
        (Question(question=entry.question, answer=entry.answer) for entry in known), directory
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=MODEL_DIRECTORY, help="where to write the model"
    )
    parser.add_argument("--minutes", type=float, default=35, help="time limit")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--entries", type=int, help="learn only so many entries (for a quick try)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(True)
    known = entries()[: arguments.entries]
    recipe = Recipe(
        num_epochs=arguments.epochs, limit_s=arguments.minutes * 60, seed=arguments.seed
    )
    tokenizer = build_tokenizer(known)
    model = build_model(tokenizer)
    print(
        f"{len(known)} questions, {model.num_parameters():,} parameters, {asdict(recipe)}",
        flush=True,
    )
    started_s = time.monotonic()
    train(model, tokenizer, known, recipe)
    save(model, tokenizer, known, arguments.out)
    print(f"{arguments.out}: done in {(time.monotonic() - started_s) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
