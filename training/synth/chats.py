"""The mixture of short chats."""

from __future__ import annotations

import random

from training.synth import facts, pick, tasks, tools
from training.synth.render import Chat, Phrases

SYSTEMS = [
    "",
    "",
    "",
    "You are a helpful assistant.",
    "You are nano, a small assistant.",
    "Answer briefly.",
    "You answer questions truthfully.",
]


def chat(rng: random.Random, phrases: Phrases, split: str = "train") -> str:
    """One sample as text, BOS to EOS."""
    draw = rng.random()
    if draw < 0.36:
        return tools.tool_chat(rng, phrases, split).text()
    if draw < 0.40:
        return f"<｜begin▁of▁sentence｜>{tasks.raw_function(rng)}<｜end▁of▁sentence｜>"
    if draw < 0.50:
        return json_chat(rng, phrases, split).text()
    thinking = rng.random() < 0.4
    result = Chat(phrases, thinking, rng.choice([50, 75, 75, 75, 100, rng.randrange(1, 101)]), rng.choice(SYSTEMS))
    if draw < 0.58:
        turns = tasks.memory(rng, split)
    else:
        makers = [
            facts.ask_fact,
            facts.ask_fact,
            facts.ask_fact,
            tasks.arithmetic,
            tasks.arithmetic,
            tasks.strings,
            tasks.python_code,
        ]
        turns = [rng.choice(makers)(rng, split) for _ in range(rng.choice([1, 1, 2, 3]))]
    for question, reasoning, answer in turns:
        result.user(question).assistant(answer, reasoning)
    return result.text()


def json_chat(rng: random.Random, phrases: Phrases, split: str) -> Chat:
    """Extraction into JSON, mostly with the schema as the response format."""
    question, reasoning, value, schema = tasks.extraction(rng, split)
    thinking = rng.random() < 0.4
    form = schema if rng.random() < 0.5 else rng.choice([None, {"type": "json_object"}])
    result = Chat(phrases, thinking, 75, pick(rng, SYSTEMS, "train"), schema=form)
    return result.user(question).assistant(tasks.as_json(value), reasoning)
