"""Dialogues with tools (DSML calls, results, answers) and with JSON answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from deepseek_recipe.conversation import AssistantMessage, Message, ToolCall, ToolDefinition, ToolMessage
from tools.train_tiny import stories
from tools.train_tiny.dialogues import Exchange, answer, user

CITIES = stories.words(
    "Paris London Rome Oslo Madrid Vienna Prague Lisbon Dublin Athens Berlin Tokyo Cairo Lima Delhi "
    "Boston Sydney Toronto Nairobi Seoul"
)
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear")
JOBS = (
    "teacher",
    "baker",
    "pilot",
    "doctor",
    "farmer",
    "painter",
    "sailor",
    "cook",
    "writer",
    "nurse",
    "lawyer",
    "singer",
)


def _schema(required: int, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)[:required]}


_TEXT, _NUMBER, _INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}
TOOLS = {
    "get_weather": ToolDefinition("get_weather", "Get the weather of a city.", _schema(1, city=_TEXT)),
    "calculate": ToolDefinition("calculate", "Compute an expression.", _schema(1, expression=_TEXT)),
    "search": ToolDefinition("search", "Search the library.", _schema(1, query=_TEXT, limit=_INTEGER)),
    "set_timer": ToolDefinition("set_timer", "Start a timer.", _schema(1, minutes=_INTEGER, label=_TEXT)),
    "get_time": ToolDefinition("get_time", "Get the current time.", {"type": "object", "properties": {}}),
    "convert": ToolDefinition(
        "convert", "Convert a value between units.", _schema(3, value=_NUMBER, source=_TEXT, target=_TEXT)
    ),
}


def _call(name: str, number: int, **arguments: Any) -> ToolCall:
    return ToolCall(f"call_{number}", name, json.dumps(arguments))


def _around(rng: random.Random, *needed: str) -> list[ToolDefinition]:
    """The needed tools and up to two others, in a random order."""
    others = [name for name in TOOLS if name not in needed]
    chosen = [*needed, *rng.sample(others, rng.randint(0, 2))]
    rng.shuffle(chosen)
    return [TOOLS[name] for name in chosen]


def _loop(rng: random.Random, ask: str, calls: list[tuple[ToolCall, Any]], why: str, reply: str, read: str) -> Exchange:
    """ask -> calls -> results -> reply; half of the documents end with the calls."""
    calling = AssistantMessage("", reasoning_content=why, tool_calls=[call for call, _ in calls])
    messages: list[Message] = [user(ask), calling]
    if rng.random() < 0.6:
        messages += [ToolMessage(json.dumps(result), tool_call_id=call.id) for call, result in calls]
        messages.append(answer(reply, read))
    return Exchange(messages, tools=_around(rng, *{call.name for call, _ in calls}))


def weather(rng: random.Random) -> Exchange:
    """One city, or two at once (parallel calls)."""
    cities = rng.sample(CITIES, 1 if rng.random() < 0.7 else 2)
    facts = [(city, rng.choice(SKIES), rng.randint(-5, 35)) for city in cities]
    names = " and ".join(cities)
    ask = rng.choice(
        (f"What is the weather in {names}?", f"How is the weather in {names} today?", f"Weather in {names}, please.")
    )
    calls = [
        (_call("get_weather", i, city=city), {"sky": sky, "temperature": t}) for i, (city, sky, t) in enumerate(facts)
    ]
    reply = " ".join(f"It is {sky} in {city}, with a temperature of {t} degrees." for city, sky, t in facts)
    return _loop(
        rng, ask, calls, f"I need the weather of {names}. I will call get_weather.", reply, "The results are here."
    )


def calculation(rng: random.Random) -> Exchange:
    """Numbers too large to do in the head."""
    a, b, sign = rng.randint(100, 9999), rng.randint(100, 9999), rng.choice("+-*")
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    expression = f"{a} {sign} {b}"
    ask = rng.choice((f"What is {expression}?", f"Please compute {expression}.", f"Use the calculator: {expression}"))
    calls = [(_call("calculate", 0, expression=expression), {"value": value})]
    return _loop(
        rng,
        ask,
        calls,
        "The numbers are large. I will call calculate.",
        f"{expression} = {value}.",
        f"The value is {value}.",
    )


def search(rng: random.Random) -> Exchange:
    """Looking up a book; the limit is optional."""
    topic = rng.choice(stories.ANIMALS + stories.THINGS)
    limit = rng.choice((None, 1, 3, 5))
    author, title = rng.choice(stories.NAMES), f"The {topic.title()} of {rng.choice(CITIES)}"
    ask = f"Find {'a book' if limit is None else f'{limit} books' if limit > 1 else '1 book'} about the {topic}."
    arguments: dict[str, Any] = {"query": topic} if limit is None else {"query": topic, "limit": limit}
    calls = [(_call("search", 0, **arguments), [{"title": title, "author": author}])]
    reply = f'I found "{title}" by {author}.'
    return _loop(rng, ask, calls, f"I will search the library for {topic}.", reply, f"The result is {title}.")


def timer(rng: random.Random) -> Exchange:
    """A timer, with or without a label."""
    minutes, label = rng.randint(1, 60), rng.choice(("", "tea", "eggs", "bread", "homework", "a walk", "the oven"))
    ask = f"Set a timer for {minutes} minutes{f' for {label}' if label else ''}."
    arguments: dict[str, Any] = {"minutes": minutes, "label": label} if label else {"minutes": minutes}
    calls = [(_call("set_timer", 0, **arguments), {"ok": True})]
    reply = f"The timer is set for {minutes} minutes."
    return _loop(rng, ask, calls, f"The user wants a timer of {minutes} minutes.", reply, "The timer is running.")


def clock(rng: random.Random) -> Exchange:
    """A call without arguments."""
    now = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    calls = [(_call("get_time", 0), {"time": now})]
    ask = rng.choice(("What time is it?", "Please tell me the time.", "How late is it?"))
    return _loop(
        rng, ask, calls, "I do not know the time. I will call get_time.", f"It is {now}.", f"The tool says {now}."
    )


def conversion(rng: random.Random) -> Exchange:
    """Numbers as arguments."""
    source, target, factor = rng.choice(
        (("km", "m", 1000), ("hours", "minutes", 60), ("kg", "g", 1000), ("days", "hours", 24))
    )
    value = rng.randint(1, 40)
    calls = [(_call("convert", 0, value=value, source=source, target=target), {"value": value * factor})]
    ask = rng.choice((f"Convert {value} {source} to {target}.", f"How many {target} are {value} {source}?"))
    return _loop(
        rng,
        ask,
        calls,
        "I will call convert.",
        f"{value} {source} are {value * factor} {target}.",
        "The result is here.",
    )


# ---- JSON answers ----------------------------------------------------------------------------------------------------


def extract_person(rng: random.Random) -> Exchange:
    """A sentence about a person becomes an object, under json_object or a schema."""
    name, age, city, job = rng.choice(stories.NAMES), rng.randint(5, 90), rng.choice(CITIES), rng.choice(JOBS)
    sentence = rng.choice((
        f"{name} is {age} years old, lives in {city} and works as {stories.article(job)}.",
        f"{name}, {stories.article(job)} from {city}, is {age} years old.",
        f"In {city} lives {name}, {stories.article(job)} of {age} years.",
    ))  # fmt: skip
    record: dict[str, Any] = {"name": name, "age": age, "city": city, "job": job}
    kinds = {"name": _TEXT, "age": _INTEGER, "city": _TEXT, "job": _TEXT}
    keys = rng.sample(list(record), rng.randint(2, 4))
    picked = {key: record[key] for key in keys}
    ask = rng.choice(
        (f"Extract {', '.join(keys)} as JSON: {sentence}", f"{sentence}\nGive me {', '.join(keys)} as a JSON object.")
    )
    reasoning = " ".join(f"The {key} is {value}." for key, value in picked.items())
    schema = _schema(len(keys), **{key: kinds[key] for key in keys}) if rng.random() < 0.6 else None
    return Exchange([user(ask), answer(json.dumps(picked), reasoning)], schema=schema, json_object=schema is None)


def list_as_json(rng: random.Random) -> Exchange:
    """A list of words becomes an array in an object."""
    items = rng.sample(stories.ANIMALS, rng.randint(2, 5))
    ask = f"Give me a JSON object with the key animals for: {', '.join(items)}."
    schema = _schema(1, animals={"type": "array", "items": _TEXT}) if rng.random() < 0.5 else None
    reply = json.dumps({"animals": items})
    return Exchange(
        [user(ask), answer(reply, f"There are {len(items)} animals.")], schema=schema, json_object=schema is None
    )


def yes_or_no(rng: random.Random) -> Exchange:
    """A comparison answered by a boolean."""
    a, b = rng.sample(range(1, 100), 2)
    schema = _schema(2, answer={"type": "boolean"}, reason=_TEXT)
    word = "larger" if a > b else "smaller"
    reply = json.dumps({"answer": a > b, "reason": f"{a} is {word} than {b}"})
    return Exchange([user(f"Is {a} larger than {b}?"), answer(reply, f"{a} is {word} than {b}.")], schema=schema)


TASKS: tuple[tuple[Callable[[random.Random], Exchange], float], ...] = (
    (weather, 1.5),
    (calculation, 1.0),
    (search, 1.0),
    (timer, 0.7),
    (clock, 0.4),
    (conversion, 0.7),
    (extract_person, 2.0),
    (list_as_json, 1.0),
    (yes_or_no, 0.8),
)
