"""Prompts that depend only on the seed and on the numbers of session and turn."""

from __future__ import annotations

import random

from serving.cli.load.settings import FIRST_TOKEN_ID

_COMMON = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by
word but not what all were we when your can said there use an each which she do how their if will up
other about out many then them these so some her would make like him into time has look two more write go
see number no way could people my than first water been call who oil its now find long down day did get
come made may part over new sound take only little work know place year live me back give most very after
thing our just name good man think say great where help through much before line right too mean old any
same tell boy follow came want show also around form three small set put end does another well large must
big even such because turn here why ask went men read need land home us move try kind hand picture again
change off play air away house
"""
_WORDS = tuple(_COMMON.split())


class PromptSource:
    """Makes the user's part of every turn. Different turns share a prefix only by chance."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size

    def words(self, session: int, turn: int, count: int) -> str:
        return " ".join(self._random(session, turn).choices(_WORDS, k=count))

    def token_ids(self, session: int, turn: int, count: int) -> list[int]:
        return self._random(session, turn).choices(range(FIRST_TOKEN_ID, self._vocab_size), k=count)

    def _random(self, session: int, turn: int) -> random.Random:
        return random.Random(f"{self._seed}/{session}/{turn}")
