"""Dialogues in V4.1's chat format: a task makes an exchange, `document` renders it with deepseek-recipe.

    exchange = messages, the last one the assistant's answer with its reasoning; tools; schema
    document = render(...) up to the answer, the answer, <eos>                     as segments (text, is special token)

Thinking is on in three of four documents; every effort level, both JSON formats, parallel and empty tool calls occur.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepseek_recipe.conversation import (
    AssistantMessage,
    Conversation,
    Message,
    SystemMessage,
    ToolDefinition,
    UserMessage,
)
from deepseek_recipe.rendering.v41 import DeepseekV41Encoding
from deepseek_recipe.tokens import SpecialToken
from tools.train_tiny import stories

Segments = list[tuple[str, bool]]
_ENCODING = DeepseekV41Encoding()


@dataclass(frozen=True)
class Exchange:
    """What was said; `messages` ends with the assistant's last answer."""

    messages: Sequence[Message]
    tools: Sequence[ToolDefinition] = field(default_factory=tuple)
    schema: Any = None  # JSON Schema of the answer
    json_object: bool = False


def user(text: str) -> UserMessage:
    """A user's message."""
    return UserMessage(text)


def answer(content: str, reasoning: str) -> AssistantMessage:
    """An assistant's message with its thinking."""
    return AssistantMessage(content, reasoning_content=reasoning)


def document(exchange: Exchange, rng: random.Random) -> Segments:
    """The exchange as the model is to write it, with a thinking mode and an effort drawn from `rng`."""
    last = exchange.messages[-1]
    if not isinstance(last, AssistantMessage):
        raise TypeError(f"an exchange ends with the assistant's answer, not with {type(last).__name__}")
    final = AssistantMessage(
        last.content, reasoning_content=last.reasoning_content, tool_calls=last.tool_calls, prefix=True
    )
    messages = [*exchange.messages[:-1], final]
    if not isinstance(messages[0], SystemMessage) and rng.random() < 0.15:
        messages.insert(0, SystemMessage("You are a helpful assistant."))
    conversation = Conversation(
        messages,
        thinking_mode=rng.random() < 0.75,
        tools=list(exchange.tools),
        reasoning_effort=rng.choice([None, None, None, "low", "high", "max"]),
        response_format="json_object" if exchange.json_object else "text",
        response_schema=exchange.schema,
    )
    prompt = _ENCODING.render_conversation(conversation)
    segments = [(text, bool(special)) for text, special in zip(prompt.segments, prompt.is_special, strict=True)]
    return [*segments, (SpecialToken.Eos.default_str(), True)]


WORDS = {"+": "plus", "-": "minus", "*": "times"}


# ---- tasks without tools -------------------------------------------------------------------------------------------


def greeting(rng: random.Random) -> Exchange:
    """Small talk, sometimes with a persona from the system message."""
    name = rng.choice(stories.NAMES)
    hello = rng.choice(
        ("Hello!", "Hi there.", "Good morning!", "Hey, how are you?", "Hello, who are you?", "Hi! What can you do?")
    )
    if rng.random() < 0.5:
        job = rng.choice(("librarian", "gardener", "teacher", "cook", "guide", "pilot", "baker", "doctor", "sailor"))
        system = SystemMessage(f"You are {name}, a helpful {job}.")
        text = rng.choice((
            f"Hello! I am {name}, and I work as {stories.article(job)}. How can I help you?",
            f"Hi! My name is {name}. I am {stories.article(job)}. What would you like to know?",
        ))  # fmt: skip
        return Exchange(
            [system, user(hello), answer(text, f"The system message says that I am {name}, {stories.article(job)}.")]
        )
    text = rng.choice((
        "Hello! I am a very small language model. How can I help you today?",
        "Hi! I am a tiny model that runs on a laptop. Ask me something simple.",
        "Good day! I can tell short stories, add numbers, explain words and call tools.",
    ))  # fmt: skip
    if rng.random() < 0.5:
        first = [
            user(f"Hi, my name is {name}."),
            answer(f"Nice to meet you, {name}! What can I do for you?", "A greeting."),
        ]
        return Exchange(
            [*first, user("What is my name?"), answer(f"Your name is {name}.", f"The user said: my name is {name}.")]
        )
    return Exchange([user(hello), answer(text, "The user greets me. I answer in a friendly way.")])


def arithmetic(rng: random.Random) -> Exchange:
    """Sums, differences and products of small numbers, with the steps in the thinking."""
    kind = rng.choice("+-*")
    a, b = (rng.randint(2, 12), rng.randint(2, 12)) if kind == "*" else (rng.randint(1, 99), rng.randint(1, 99))
    if kind == "-" and a < b:
        a, b = b, a
    value = {"+": a + b, "-": a - b, "*": a * b}[kind]
    question = rng.choice((
        f"What is {a} {kind} {b}?", f"Compute {a} {kind} {b}.", f"{a} {kind} {b} =",
        f"How much is {a} {WORDS[kind]} {b}?",
    ))  # fmt: skip
    tens, ones = b // 10 * 10, b % 10
    steps = f"{a} {kind} {b} = {value}."
    if kind != "*" and tens and ones:
        middle = a + tens if kind == "+" else a - tens
        steps = f"First {a} {kind} {tens} = {middle}. Then {middle} {kind} {ones} = {value}."
    return Exchange(
        [user(question), answer(rng.choice((f"{a} {kind} {b} = {value}.", f"The answer is {value}.")), steps)]
    )


def tell_story(rng: random.Random) -> Exchange:
    """A story about a hero, an animal or a thing that the user names."""
    hero, thing, animal = rng.choice(stories.NAMES), rng.choice(stories.THINGS), rng.choice(stories.ANIMALS)
    ask, facts = rng.choice((
        (f"Tell me a story about {stories.article(animal)} named {hero}.", stories.cast(rng, hero=hero, animal=animal)),
        (f"Write a short story about {hero} and {stories.article(thing)}.", stories.cast(rng, hero=hero, thing=thing)),
        (f"Please tell me a story about {stories.article(animal)}.", stories.cast(rng, animal=animal)),
        ("Tell me a story.", stories.cast(rng)),
        (f"I would like to hear a story about {stories.article(thing)}.", stories.cast(rng, thing=thing)),
    ))  # fmt: skip
    plan = (
        f"The hero is {facts.hero}, {stories.article(facts.trait)} {facts.kind}. The {facts.thing} gets lost. "
        f"{facts.helper} the {facts.helper_kind} helps to find it {facts.spot}."
    )
    return Exchange([user(ask), answer(stories.story(rng, facts), plan)])


def explain_word(rng: random.Random, words: Sequence[tuple[str, str, str, list[str]]]) -> Exchange:
    """A definition, with an example sentence if asked."""
    word, kind, definition, examples = rng.choice(words)
    ask = rng.choice(
        (f'What does "{word}" mean?', f"Define the word {word}.", f"What is the meaning of {word}?", f"Explain: {word}")
    )
    text = f'As {stories.article(kind)}, "{word}" means: {definition}.'
    if examples and rng.random() < 0.6:
        ask += " Give an example."
        text += f' For example: "{examples[0]}"'
    return Exchange([user(ask), answer(text, f"The user asks about the {kind} {word}.")])


def words_and_letters(rng: random.Random) -> Exchange:
    """Spelling, counting, sorting and reversing."""
    items = rng.sample(stories.ANIMALS + stories.THINGS[:4], rng.randint(3, 5))
    word = rng.choice(stories.ANIMALS + tuple(n.lower() for n in stories.NAMES))
    listed = ", ".join(items)
    task = rng.randrange(5)
    if task == 0:
        return Exchange(
            [user(f"Spell the word {word}."), answer("-".join(word.upper()), f"The letters are {', '.join(word)}.")]
        )
    if task == 1:
        ask = f"Sort these words by the alphabet: {listed}."
        return Exchange(
            [user(ask), answer(", ".join(sorted(items)), f"The first is {min(items)}, the last is {max(items)}.")]
        )
    if task == 2:
        count = ", ".join(f"{i}: {w}" for i, w in enumerate(items, 1))
        ask = f"How many words are in this list: {listed}?"
        return Exchange([user(ask), answer(f"There are {len(items)} words.", count)])
    if task == 3:
        bullet = "\n".join(f"- {w}" for w in items)
        return Exchange([user(f"Make a list of: {listed}."), answer(bullet, f"There are {len(items)} items.")])
    ask = f"Say the list backwards: {listed}."
    return Exchange([user(ask), answer(", ".join(reversed(items)), f"The last is {items[-1]}, so I start with it.")])


def remember(rng: random.Random, passages: Sequence[str]) -> Exchange:
    """Facts stated before a long passage and asked for after it: this is what the indexer is for."""
    facts: dict[str, tuple[str, str]] = {}
    for owner in rng.sample(stories.NAMES, rng.randint(1, 3)):
        kind = rng.choice(("secret code", "favourite animal", "lost thing", "hiding place"))
        value = {
            "secret code": str(rng.randint(1000, 9999)),
            "favourite animal": rng.choice(stories.ANIMALS),
            "lost thing": rng.choice(stories.THINGS),
            "hiding place": rng.choice(stories.SPOTS),
        }[kind]
        facts[owner] = (kind, value)
    stated = " ".join(f"{owner}'s {kind} is: {value}." for owner, (kind, value) in facts.items())
    passage = rng.choice(passages)
    asked = rng.choice(list(facts))
    kind, value = facts[asked]
    text = f"Remember this. {stated}\n\nNow read the following.\n\n{passage}\n\nWhat is {asked}'s {kind}?"
    return Exchange(
        [
            user(text),
            answer(f"{asked}'s {kind} is: {value}.", f"It was said at the start: {asked}'s {kind} is: {value}."),
        ]
    )


def retell(rng: random.Random) -> Exchange:
    """A story followed by questions about it, one after another."""
    c = stories.cast(rng)
    pairs = rng.sample((
        (f"What did {c.hero} lose?", f"{c.hero} lost the {c.thing}."),
        ("Who helped?", f"{c.helper} the {c.helper_kind} helped {c.hero}."),
        (f"Where was the {c.thing}?", f"The {c.thing} was {c.spot}."),
        (f"Where did {c.hero} live?", f"{c.hero} lived in {c.place}."),
        (f"What was {c.hero} like?", f"{c.hero} was {c.trait}."),
    ), rng.randint(1, 3))  # fmt: skip
    messages: list[Message] = []
    for number, (question, reply) in enumerate(pairs):
        text = f"{stories.story(rng, c)}\n\n{question}" if number == 0 else question
        messages += [
            user(text),
            answer(reply, f"In the story, {reply[0].lower() + reply[1:] if reply.startswith('The') else reply}"),
        ]
    return Exchange(messages)


TASKS: tuple[tuple[Callable[[random.Random], Exchange], float], ...] = (
    (greeting, 1.0),
    (arithmetic, 2.5),
    (tell_story, 2.5),
    (words_and_letters, 1.5),
    (retell, 1.5),
)
