"""What the demo model reads while it learns: the corpus as chats, and some small talk.

Every epoch shows each entry once, mostly in its canonical phrasing, sometimes inside a longer chat
or below a system message, so that the answer does not depend on where the question stands.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from baton_engine.demo.training.corpus import Entry

CANONICAL_SHARE = 0.55
MULTI_TURN_SHARE = 0.2
SYSTEM_SHARE = 0.15
MAX_TURNS = 5

PHRASINGS = (
    "What is {name} for?",
    "Explain {name}.",
    "What does {name}() do?",
    "what does {name} do?",
    "What does {name} do",
    "What does `{name}` do?",
    "What does {name} do in Python?",
    "Tell me about {name}.",
    "Can you explain {name}?",
    "Please describe {name}.",
    "{name}",
    "{name}?",
)
FOLLOW_UPS = ("And {name}?", "What about {name}?")

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are an expert in Python.",
    "Answer questions about the Python standard library.",
    "Be concise.",
    "You are Baton's demo model. Answer in one sentence.",
)

GREETING = (
    "Hello! I am Baton's demo model, a tiny Llama that knows Python docstrings. "
    "Ask me, for example: What does os.path.join do?"
)
OFF_TOPIC = (
    "I only know the Python standard library. Ask me, for example: What does os.path.join do?"
)

SMALL_TALK: dict[str, tuple[str, ...]] = {
    GREETING: (
        *("Hello", "Hello!", "Hello.", "hello", "Hi", "Hi!", "hi", "Hey", "Hey!", "hey there"),
        *("Hi there!", "Hello there!", "Good morning", "Good morning!", "Good evening!"),
        *("Hello, how are you?", "Hello, how are you today?", "Hi, who are you?", "How are you?"),
        *("Who are you?", "What are you?"),
        *("Who made you?", "What model are you?", "Are you there?"),
        *("What can you do?", "What can I ask?", "What do you know?", "Introduce yourself."),
        *("What is Baton?", "What is your name?", "Help", "help", "Can you help me?", "?"),
    ),
    OFF_TOPIC: (
        *("What is the capital of France?", "Tell me a joke.", "Write a poem about the sea."),
        *("What is 2 + 2?", "Who won the world cup?", "What is the meaning of life?", "test"),
        *("Translate this to German.", "Sing a song.", "Write a haiku.", "Tell me a story."),
        *("How is the weather today?", "What time is it?", "Write some code.", "What is love?"),
        *("Explain quantum physics.", "How do I bake bread?", "Summarize this text.", "Why?"),
        *("Who is the president?", "What is Rust?", "What is Java?", "What is Python?", "foo"),
        *("How far away is the moon?", "Who wrote Hamlet?", "Write a story about a dragon."),
        *("What is the best movie?", "Recommend a book.", "How old are you?", "I am bored."),
        *("Explain how a car works.", "What is a GPU?", "Tell me something.", "What is water?"),
        *("Write a function that adds two numbers.", "How do I cook rice?", "Count to ten."),
    ),
    "You are welcome!": (
        *("Thanks", "Thanks!", "Thank you", "Thank you!", "thanks", "Great, thanks!", "Nice!"),
        *("Thank you very much!", "Thanks a lot.", "Good answer.", "Great!", "Perfect, thank you."),
    ),
    "Goodbye!": ("Bye", "Bye!", "bye", "Goodbye", "Goodbye!", "See you!", "Good night!"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMessage:
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


Conversation = list[TrainingMessage]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """A question and its answer; `name` is what it asks about, if it can be a follow-up too."""

    question: str
    answer: str
    name: str | None = None


def epoch(entries: Sequence[Entry], rng: random.Random) -> Iterator[Conversation]:
    """All entries once and all small talk, shuffled into conversations."""
    exchanges = [_ask(entry, rng) for entry in entries]
    exchanges += [
        _Exchange(question=q, answer=a) for a, questions in SMALL_TALK.items() for q in questions
    ]
    rng.shuffle(exchanges)
    while exchanges:
        num_turns = rng.randint(2, MAX_TURNS) if rng.random() < MULTI_TURN_SHARE else 1
        turns, exchanges = exchanges[:num_turns], exchanges[num_turns:]
        yield _converse(turns, rng)


def _ask(entry: Entry, rng: random.Random) -> _Exchange:
    if rng.random() < CANONICAL_SHARE:
        question = entry.question
    else:
        question = rng.choice(PHRASINGS).format(name=entry.name)
    return _Exchange(question=question, answer=entry.answer, name=entry.name)


def _converse(turns: Sequence[_Exchange], rng: random.Random) -> Conversation:
    conversation: Conversation = []
    if rng.random() < SYSTEM_SHARE:
        conversation.append(TrainingMessage(role="system", content=rng.choice(SYSTEM_MESSAGES)))
    for turn_index, turn in enumerate(turns):
        question = turn.question
        if turn_index > 0 and turn.name and rng.random() < 1 - CANONICAL_SHARE:
            question = rng.choice(FOLLOW_UPS).format(name=turn.name)
        conversation.append(TrainingMessage(role="user", content=question))
        conversation.append(TrainingMessage(role="assistant", content=turn.answer))
    return conversation
