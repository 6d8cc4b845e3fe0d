"""Seeded draws of words and values: names, places, codes, numbers, words made up from syllables.

About half of all values are made up, so that recalling one is real copying and not a choice from a known list. A
checksum splits made-up words: one in eight is *held out*. Training never sees held-out words, and evaluation draws no
other made-up words.
"""

import random
import tomllib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT = Path(__file__).parent / "text"
HELD_OUT_SHARE = 8
CODE_CHARACTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789-"


def load(name: str) -> dict[str, Any]:
    """One of the text files beside this module."""
    return tomllib.loads((TEXT / name).read_text(encoding="utf-8"))


LISTS: Mapping[str, list[str]] = load("words.toml")


def is_held_out(word: str) -> bool:
    """Whether a made-up word belongs to evaluation only. Case does not matter."""
    return zlib.crc32(word.lower().encode()) % HELD_OUT_SHARE == 0


@dataclass(frozen=True)
class Draw:
    """The random draws of one dialogue. ``held_out`` chooses the side of the split for made-up words."""

    rng: random.Random
    held_out: bool

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def one_of(self, items: Sequence[str]) -> str:
        return self.rng.choice(items)

    def listed(self, name: str) -> str:
        """A word from one of the lists in ``words.toml``."""
        return self.rng.choice(LISTS[name])

    def word(self) -> str:
        """A made-up word of two or three syllables, in lower case."""
        rng = self.rng
        while True:
            count = 2 if rng.random() < 0.7 else 3
            syllables = [rng.choice(LISTS["onsets"]) + rng.choice(LISTS["vowels"]) for _ in range(count)]
            word = "".join(syllables) + rng.choice(LISTS["codas"])
            if is_held_out(word) == self.held_out:
                return word

    def name(self) -> str:
        return self.word().capitalize()

    def mixed(self, items: Sequence[str], made_up: Callable[[], str], share: float = 0.5) -> str:
        """One of ``items`` or, with probability ``share``, a made-up value."""
        return made_up() if self.chance(share) else self.rng.choice(items)

    def digits(self, low: int, high: int) -> str:
        """A number of ``low`` to ``high`` digits."""
        count = self.rng.randint(low, high)
        return str(self.rng.randint(1, 9)) + "".join(str(self.rng.randint(0, 9)) for _ in range(count - 1))

    def code(self) -> str:
        """A code word in one of many forms: zebra, KAVOR, blue-otter, zebra42, K7QM3, 4821."""
        shape = self.rng.random()
        known = LISTS["code_words"]
        if shape < 0.3:
            return self.one_of(known)
        word = self.word()
        if shape < 0.55:
            return word
        if shape < 0.65:
            return self.one_of([word.capitalize(), word.upper(), self.one_of(known).upper()])
        if shape < 0.77:
            first = self.one_of(LISTS["colours"] + known)
            return f"{first}-{self.one_of(LISTS['animals'] + LISTS['nouns'] + [word])}"
        if shape < 0.87:
            base = self.one_of([self.one_of(known), word, word.upper()])
            return f"{base}{self.one_of(['', '-'])}{self.rng.randint(0, 999)}"
        if shape < 0.95:
            letters = "".join(self.rng.choice(CODE_CHARACTERS) for _ in range(self.rng.randint(3, 5)))
            return letters + str(self.rng.randint(0, 99))
        return self.digits(3, 6)

    def clock_time(self) -> str:
        return f"{self.rng.randint(1, 23)}:{self.one_of(['00', '15', '30', '45', '10', '20', '05'])}"

    def date(self) -> str:
        return f"{self.rng.randint(1, 28)} {self.listed('months')}"

    def person(self) -> str:
        """A first name, sometimes with a made-up surname."""
        first = self.mixed(LISTS["first_names"], self.name)
        return f"{first} {self.name()}" if self.chance(0.2) else first

    def job(self) -> str:
        return f"a {self.word()}" if self.chance(0.25) else self.listed("jobs")

    def place(self) -> str:
        return f"the {self.word()} box" if self.chance(0.25) else self.listed("places")

    def value(self, wanted: Mapping[str, Any]) -> str:
        """A value as ``facts.toml`` describes it: from lists, of digits, or of one of the special sorts."""
        if "special" in wanted:
            special: dict[str, Callable[[], str]] = {
                "clock_time": self.clock_time,
                "code": self.code,
                "date": self.date,
                "job": self.job,
                "name": self.name,
                "person": self.person,
                "place": self.place,
            }
            return special[wanted["special"]]()
        if "digits" in wanted:
            low, high = wanted["digits"]
            return self.digits(low, high)
        items = [item for name in wanted["lists"] for item in LISTS[name]]
        if "made_up" not in wanted:
            return self.one_of(items)
        made_up = {"word": self.word, "name": self.name}[wanted["made_up"]]
        return self.mixed(items, made_up, wanted.get("share", 0.5))
