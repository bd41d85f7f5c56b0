"""Short stories from a small grammar with state: who, where, what is lost, who helps, what is learnt.

    opening -> wish -> obstacle -> helper -> turn -> ending        each drawn from several wordings

The same few facts (names, place, thing) run through a whole story, so whoever writes it has to look back for them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


def words(text: str) -> tuple[str, ...]:
    """The words of a line."""
    return tuple(text.split())


NAMES = words(
    "Anna Ben Clara David Ella Finn Grace Henry Iris Jack Kate Leo Mia Noah Olive Paul Rosa Sam Tess "
    "Victor Wendy Max Lucy Oscar Nina Hugo Julia Theo Maya Arthur"
)
ANIMALS = words(
    "fox bear rabbit owl mouse cat dog hedgehog duck frog squirrel goat horse crow badger turtle deer wolf lamb beaver"
)
PLACES = (
    "a small village by the sea",
    "a house at the edge of the forest",
    "a town between two hills",
    "a farm near the river",
    "a valley full of flowers",
    "a cottage under an old oak",
    "a quiet street in the city",
    "an island with a lighthouse",
    "a castle on a hill",
    "a mill beside a stream",
)
THINGS = (
    "key",
    "lantern",
    "red scarf",
    "silver ring",
    "wooden boat",
    "kite",
    "blue book",
    "drum",
    "golden coin",
    "bell",
    "map",
    "basket",
    "little clock",
    "paper crown",
    "glass bead",
    "green hat",
    "music box",
    "compass",
    "letter",
    "warm blanket",
)
TRAITS = words("kind curious brave shy clever patient cheerful stubborn careful sleepy proud gentle")
SEASONS = words("spring summer autumn winter")
WEATHERS = words("sunny windy rainy cold foggy warm snowy quiet")
SPOTS = (
    "under the bridge",
    "behind the old barn",
    "at the top of the tower",
    "in the hollow tree",
    "near the well",
    "in the tall grass",
    "beside the stone wall",
    "at the bottom of the pond",
    "inside the cave",
    "on the roof of the school",
    "in the attic",
)


@dataclass(frozen=True)
class Cast:
    """The facts of one story."""

    hero: str
    kind: str  # "girl", "boy" or an animal
    pronoun: tuple[str, str, str]  # subject, object, possessive
    trait: str
    place: str
    thing: str
    helper: str
    helper_kind: str
    spot: str


_PEOPLE = (("girl", ("she", "her", "her")), ("boy", ("he", "him", "his")))
_GIRLS = frozenset(words("Anna Clara Ella Grace Iris Kate Mia Olive Rosa Tess Wendy Lucy Nina Julia Maya"))


def cast(rng: random.Random, *, hero: str | None = None, thing: str | None = None, animal: str | None = None) -> Cast:
    """Draw the facts of a story; the caller may fix the hero's name, the thing, or that the hero is this animal."""
    name = hero or rng.choice(NAMES)
    kind, pronoun = _PEOPLE[0] if name in _GIRLS else _PEOPLE[1]
    if animal or (hero is None and rng.random() < 0.4):
        kind = animal or rng.choice(ANIMALS)
    helper = rng.choice([n for n in NAMES if n != name])
    return Cast(name, kind, pronoun, rng.choice(TRAITS), rng.choice(PLACES), thing or rng.choice(THINGS), helper,
                rng.choice([a for a in ANIMALS if a != kind]), rng.choice(SPOTS))  # fmt: skip


def article(noun: str) -> str:
    """The noun with "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def story(rng: random.Random, facts: Cast | None = None) -> str:
    """A story of five to seven sentences groups, about 500 to 1,000 characters, two to four paragraphs."""
    c = facts or cast(rng)
    paragraphs = [
        f"{_opening(rng, c)} {_wish(rng, c)}",
        _obstacle(rng, c),
        f"{_helper(rng, c)} {_turn(rng, c)}",
        _ending(rng, c),
    ]
    if rng.random() < 0.3:
        paragraphs[0:2] = [" ".join(paragraphs[0:2])]
    return "\n\n".join(paragraphs)


# Every part draws one of its wordings; a wording is a list of sentences.


def _pick(rng: random.Random, *wordings: Sequence[str]) -> str:
    return " ".join(rng.choice(wordings))


def _opening(rng: random.Random, c: Cast) -> str:
    who = f"{article(c.trait)} {c.kind} named {c.hero}"
    weather, season = rng.choice(WEATHERS), rng.choice(SEASONS)
    home = f"{c.hero} lived in {c.place}."
    return _pick(
        rng,
        [f"Once upon a time there was {who}.", home],
        [f"In {c.place} there lived {who}."],
        [f"One {weather} morning in {season}, {who} woke up early.", home],
        [
            f"Long ago, in {c.place}, there was {who}.",
            f"Everyone knew {c.hero}, because {c.pronoun[0]} was so {c.trait}.",
        ],
    )


def _wish(rng: random.Random, c: Cast) -> str:
    he, him, his = c.pronoun
    return _pick(
        rng,
        [f"{c.hero} had {article(c.thing)} that {he} loved more than anything else."],
        [f"{his.capitalize()} grandmother had given {him} {article(c.thing)}, and {he} took it everywhere."],
        [f"More than anything, {c.hero} loved {his} {c.thing}."],
        [f"Every evening {he} looked at {his} {c.thing} and smiled."],
    )


def _obstacle(rng: random.Random, c: Cast) -> str:
    he = c.pronoun[0]
    weather = rng.choice(WEATHERS)
    looked = f"{c.hero} looked under the bed, behind the door and in the garden, but {he} could not find it."
    return _pick(
        rng,
        [f"One day the {c.thing} was gone.", looked, f'"Where is my {c.thing}?" {he} cried.'],
        [
            f"Then came a {weather} day, and the wind carried the {c.thing} away.",
            f"{c.hero} ran after it until {he} was tired, but it was too fast.",
        ],
        [
            f"One afternoon {c.hero} came home and saw that the {c.thing} was missing.",
            f"{he.capitalize()} sat down on the step and did not know what to do.",
        ],
        [
            f"But on the way to the market {c.hero} lost the {c.thing}.",
            f"{he.capitalize()} searched the whole road twice.",
            f"It was getting dark, and {he} felt very sad.",
        ],
    )


def _helper(rng: random.Random, c: Cast) -> str:
    he, him, _ = c.pronoun
    friend = f"{article(c.helper_kind)} named {c.helper}"
    return _pick(
        rng,
        [
            f"Just then {friend} came by.",
            f'"Why are you sad?" asked {c.helper}.',
            f'"I have lost my {c.thing}," said {c.hero}.',
        ],
        [
            f"{friend[0].upper() + friend[1:]} heard {him} and stopped.",
            f'"Do not worry," said {c.helper}. "I will help you look for the {c.thing}."',
        ],
        [
            f'On the road {he} met {friend}. "Have you seen my {c.thing}?" asked {c.hero}.',
            f'{c.helper} thought for a while. "I think I saw it {c.spot}," said {c.helper}.',
        ],
    )


def _turn(rng: random.Random, c: Cast) -> str:
    he, _, his = c.pronoun
    return _pick(
        rng,
        [f"Together they went and looked {c.spot}.", f"And there it was: the {c.thing}!"],
        [
            f'They walked for a long time. At last {c.helper} pointed and said, "Look!"',
            f"{c.spot[0].upper() + c.spot[1:]} lay the {c.thing}.",
        ],
        [f"So the two of them searched until the moon came up, and {c.spot} they found the {c.thing}."],
        [f"{c.hero} followed {c.helper}, and {c.spot} {he} saw {his} {c.thing} shining in the light."],
    )


def _ending(rng: random.Random, c: Cast) -> str:
    he, him, his = c.pronoun
    return _pick(
        rng,
        [f'"Thank you, {c.helper}!" said {c.hero}.', f"From that day on, {c.hero} and {c.helper} were best friends."],
        [
            f"{c.hero} was so happy that {he} danced all the way home.",
            f"{he.capitalize()} never forgot how {c.helper} the {c.helper_kind} had helped {him}.",
        ],
        [
            f"{c.hero} gave {c.helper} a big hug, and they shared a warm supper.",
            f"That night {he} put the {c.thing} beside {his} bed and slept well.",
        ],
        [
            f'"A good friend is worth more than {article(c.thing)}," said {c.hero}, and {c.helper} agreed.',
            "They went home together.",
        ],
        [
            f"{c.hero} learned that it is good to ask for help.",
            f"And {c.helper} learned that helping makes everyone happy.",
        ],
    )
