"""Kinds of facts: how a user states one, how it is asked for, and the one sentence that answers.

In every template ``{s}`` is the subject ("dog") and ``{v}`` the value ("Rex"). Answers never begin with
the value, so that the value is always preceded by a space and has the same tokens wherever it stands.
"""

import random
from dataclasses import dataclass

from assets.training import vocabulary as words
from assets.training.vocabulary import Sampler


@dataclass(frozen=True)
class FactKind:
    """``subjects`` None means that subjects are sampled names."""

    name: str
    subjects: tuple[str, ...] | None
    sample_value: Sampler
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Fact:
    kind: FactKind
    subject: str
    value: str

    @property
    def key(self) -> tuple[str, str]:
        return (self.kind.name, self.subject)

    @property
    def answer(self) -> str:
        return self.kind.answer.format(s=self.subject, v=self.value)

    def state(self, rng: random.Random) -> str:
        return rng.choice(self.kind.statements).format(s=self.subject, v=self.value)

    def ask(self, rng: random.Random) -> str:
        return rng.choice(self.kind.questions).format(s=self.subject)


PETS = tuple("dog cat hamster rabbit parrot horse goldfish turtle pony lizard snake canary puppy kitten goat".split())
RELATIVES = (
    *"sister brother mother father wife husband son daughter boss neighbour doctor teacher".split(),
    *"cousin uncle aunt colleague dentist manager landlord roommate coach grandmother".split(),
    "best friend",
)
CODE_THINGS = ("code word", "password", "secret word", "magic word", "access code", "code", "passphrase", "keyword")
NUMBER_THINGS = (
    *("locker number", "room number", "PIN", "flight number", "phone number", "lucky number", "ticket number"),
    *("badge number", "house number", "order number", "account number", "seat number"),
)
HIDDEN_THINGS = ("keys", "glasses", "tickets", "letters", "spoons", "batteries", "scissors", "photos", "gloves", "coins")
EVENTS = ("meeting", "party", "exam", "concert", "interview", "picnic", "wedding", "lesson", "appointment", "match")
FAVOURITES: tuple[tuple[str, Sampler], ...] = (
    ("colour", words.mixed(words.COLOURS, words.made_up_word, 0.25)),
    ("color", words.mixed(words.COLOURS)),
    ("food", words.mixed(words.FOODS, words.made_up_word, 0.25)),
    ("fruit", words.mixed(words.FRUITS, words.made_up_word, 0.2)),
    ("drink", words.mixed(words.DRINKS, words.made_up_word, 0.3)),
    ("sport", words.mixed(words.SPORTS, words.made_up_word, 0.2)),
    ("animal", words.mixed(words.ANIMALS, words.made_up_word, 0.2)),
    ("season", words.mixed(words.SEASONS)),
    ("number", words.digits(1, 3)),
    ("city", words.mixed(words.CITIES, words.made_up_name, 0.4)),
    ("day", words.mixed(words.DAYS)),
    ("instrument", words.mixed(words.INSTRUMENTS)),
    ("language", words.mixed(words.LANGUAGES, words.made_up_name, 0.3)),
    ("band", words.made_up_name),
    ("game", words.mixed(words.SPORTS, words.made_up_name, 0.6)),
)

_NAME = words.two_names
_CITY = words.mixed(words.CITIES, words.made_up_name)

KINDS: tuple[FactKind, ...] = (
    FactKind(
        "pet",
        PETS,
        words.mixed(words.PET_NAMES, words.made_up_name),
        (
            "My {s} is called {v}.",
            "My {s}'s name is {v}.",
            "I have a {s} called {v}.",
            "I have a {s} named {v}.",
            "The name of my {s} is {v}.",
            "My {s} is named {v}.",
        ),
        (
            "What is my {s} called?",
            "What is my {s}'s name?",
            "What's the name of my {s}?",
            "What is the name of my {s}?",
            "What's my {s} called?",
            "Do you remember what my {s} is called?",
            "Do you remember my {s}'s name?",
            "Can you tell me the name of my {s}?",
            "How is my {s} called?",
        ),
        "Your {s} is called {v}.",
    ),
    FactKind(
        "relative",
        RELATIVES,
        _NAME,
        ("My {s} is called {v}.", "My {s}'s name is {v}.", "The name of my {s} is {v}.", "My {s} is named {v}."),
        (
            "What is my {s} called?",
            "What is my {s}'s name?",
            "What's the name of my {s}?",
            "What is the name of my {s}?",
            "Who is my {s}?",
            "Do you remember my {s}'s name?",
        ),
        "Your {s} is called {v}.",
    ),
    FactKind(
        "own name",
        ("me",),
        _NAME,
        ("My name is {v}.", "I am {v}.", "I'm {v}.", "You can call me {v}.", "People call me {v}.", "I am called {v}."),
        ("What is my name?", "What's my name?", "Who am I?", "Do you know my name?", "Do you remember my name?", "What am I called?"),
        "Your name is {v}.",
    ),
    *(
        FactKind(
            f"favourite {thing}",
            (thing,),
            sampler,
            (
                "My favourite {s} is {v}.",
                "My favorite {s} is {v}.",
                "The {s} I like most is {v}.",
                "If I had to pick a favourite {s}, it is {v}.",
            ),
            (
                "What is my favourite {s}?",
                "What is my favorite {s}?",
                "What's my favourite {s}?",
                "Which {s} do I like most?",
                "Do you remember my favourite {s}?",
                "Which {s} is my favourite?",
            ),
            "Your favourite {s} is {v}.",
        )
        for thing, sampler in FAVOURITES
    ),
    FactKind(
        "home",
        ("home",),
        _CITY,
        ("I live in {v}.", "My home is in {v}.", "I moved to {v}, so I live in {v}.", "The city I live in is {v}."),
        ("Where do I live?", "Which city do I live in?", "In which city do I live?", "Do you remember where I live?"),
        "You live in {v}.",
    ),
    FactKind(
        "birthplace",
        ("birth",),
        _CITY,
        ("I was born in {v}.", "I come from {v}, I was born in {v}.", "My birthplace is {v}."),
        ("Where was I born?", "In which city was I born?", "What is my birthplace?", "Do you remember where I was born?"),
        "You were born in {v}.",
    ),
    FactKind(
        "job",
        ("job",),
        words.job,
        ("I work as {v}.", "My job is being {v}.", "I am working as {v}.", "I earn my money as {v}."),
        ("What is my job?", "What do I do for work?", "What do I work as?", "Do you remember my job?", "What's my job?"),
        "You work as {v}.",
    ),
    FactKind(
        "code",
        CODE_THINGS,
        words.code,
        ("The {s} is {v}.", "The {s} for today is {v}.", "My {s} is {v}.", "We agreed on the {s} {v}.", "Keep the {s} {v} safe."),
        (
            "What is the {s}?",
            "What's the {s}?",
            "What was the {s}?",
            "Tell me the {s}.",
            "Do you remember the {s}?",
            "Which {s} did I give you?",
            "Can you repeat the {s}?",
            "What is my {s}?",
            "Repeat the {s}.",
        ),
        "The {s} is {v}.",
    ),
    FactKind(
        "number",
        NUMBER_THINGS,
        words.digits(2, 6),
        ("My {s} is {v}.", "The {s} is {v}.", "I was given the {s} {v}."),
        ("What is my {s}?", "What's my {s}?", "What is the {s}?", "Tell me my {s}.", "Do you remember my {s}?", "What was my {s}?"),
        "Your {s} is {v}.",
    ),
    FactKind(
        "hidden thing",
        HIDDEN_THINGS,
        words.place,
        ("The {s} are in {v}.", "I put the {s} in {v}.", "My {s} are in {v}.", "I left the {s} in {v}.", "You find the {s} in {v}."),
        ("Where are the {s}?", "Where are my {s}?", "Where did I put the {s}?", "Where did I leave my {s}?", "Do you know where the {s} are?"),
        "The {s} are in {v}.",
    ),
    FactKind(
        "event day",
        EVENTS,
        words.mixed(words.DAYS),
        ("The {s} is on {v}.", "My {s} is on {v}.", "The {s} takes place on {v}."),
        ("On which day is the {s}?", "What day is the {s}?", "Which day is my {s}?", "On what day is my {s}?"),
        "The {s} is on {v}.",
    ),
    FactKind(
        "event time",
        EVENTS,
        words.clock_time,
        ("The {s} starts at {v}.", "My {s} starts at {v}.", "The {s} begins at {v}."),
        ("At what time does the {s} start?", "What time does my {s} start?", "When does the {s} begin?", "What time is the {s}?"),
        "The {s} starts at {v}.",
    ),
    FactKind(
        "birthday",
        ("birthday",),
        words.date,
        ("My birthday is on {v}.", "I was born on {v}.", "I celebrate my birthday on {v}."),
        ("When is my birthday?", "On which date is my birthday?", "What is my birthday?", "Do you remember my birthday?"),
        "Your birthday is on {v}.",
    ),
    FactKind(
        "friend lives",
        None,
        _CITY,
        ("My friend {s} lives in {v}.", "Our friend {s} lives in {v}.", "My friend {s} moved to {v}."),
        ("Where does {s} live?", "Where does my friend {s} live?", "In which city does {s} live?"),
        "Your friend {s} lives in {v}.",
    ),
    FactKind(
        "friend likes",
        None,
        words.mixed([*words.FOODS, *words.SPORTS, *words.DRINKS], words.made_up_word, 0.4),
        ("My friend {s} likes {v}.", "My friend {s} loves {v}.", "Our friend {s} really likes {v}."),
        ("What does {s} like?", "What does my friend {s} like?", "What is it that {s} likes?"),
        "Your friend {s} likes {v}.",
    ),
    FactKind(
        "ship",
        ("ship", "boat", "car", "bike", "house", "farm", "company", "robot", "street", "village", "team", "school", "project"),
        words.made_up_name,
        ("My {s} is called {v}.", "The name of my {s} is {v}.", "I named my {s} {v}.", "My {s}'s name is {v}."),
        ("What is my {s} called?", "What's the name of my {s}?", "What is the name of my {s}?", "What name did I give my {s}?"),
        "Your {s} is called {v}.",
    ),
    FactKind(
        "age",
        ("age",),
        words.digits(2, 2),
        ("I am {v} years old.", "My age is {v}.", "I'm {v} years old."),
        ("How old am I?", "What is my age?", "Do you remember how old I am?"),
        "You are {v} years old.",
    ),
)

# Kinds with many possible subjects come up more often than single ones.
WEIGHTS = tuple(4.0 if kind.name in {"pet", "code", "relative"} else 0.5 if kind.name.startswith("favourite") else 1.5 for kind in KINDS)


def sample_kind(rng: random.Random) -> FactKind:
    return rng.choices(KINDS, WEIGHTS)[0]


def sample_fact(rng: random.Random, held_out: bool, kind: FactKind | None = None) -> Fact:
    """A random fact; ``held_out`` chooses the side of the split for made-up words."""
    kind = kind or sample_kind(rng)
    if kind.subjects is None:
        subject = words.mixed(words.FIRST_NAMES, words.made_up_name, 0.3)(rng, held_out)
    else:
        subject = rng.choice(kind.subjects)
    return Fact(kind, subject, kind.sample_value(rng, held_out))


def with_new_value(rng: random.Random, fact: Fact, held_out: bool) -> Fact:
    """The same fact after an update: another value."""
    for _ in range(20):
        value = fact.kind.sample_value(rng, held_out)
        if value != fact.value:
            return Fact(fact.kind, fact.subject, value)
    return fact
