"""Session talkers that stream every turn and note what a user notices: when its tokens came, and how much of the wait
for the first token was the prefill that the turn needs anyway."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx
import numpy as np

from benchmarks.failures.session_talkers import TOKENS, Answer, Findings, Talker

PREFILL_LENGTHS = (16, 128, 512, 1024, 1750)
PREFILL_TRIES = 3


@dataclass(slots=True)
class StreamedTurn:
    """A turn. Times are monotonic seconds. `asked_s` is when it was first sent, so failed attempts are included.

    Of its `prompt_tokens`, `cached_tokens` had KV when its first token came. `history_len` is the number of tokens that
    the session had before it. `replayed`: an earlier attempt had been committed.
    """

    asked_s: float
    history_len: int
    first_s: float = 0.0
    ended_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    replayed: bool = False

    @property
    def first_token_s(self) -> float:
        """Seconds until its first token."""
        return self.first_s - self.asked_s

    @property
    def computed_again(self) -> int:
        """Tokens of the history whose KV was computed again. The last is not counted: it always is, for its logits."""
        return 0 if self.replayed else max(0, self.history_len - 1 - self.cached_tokens)


class StreamingTalker(Talker):
    """`turns` are the turns that ended; `heard_s` has the time of everything that came, of any turn."""

    def __init__(self, client: httpx.AsyncClient, findings: Findings, seed: str) -> None:
        super().__init__(client, findings, seed, stream_share=1.0, leaving_share=0.0)
        self.turns: list[StreamedTurn] = []
        self.heard_s: list[float] = []
        self._turn_now = StreamedTurn(0.0, 0)

    async def _turn(self) -> None:
        self._turn_now = StreamedTurn(time.monotonic(), len(self._history))
        await super()._turn()

    def _heard(self, answer: Answer) -> None:
        now_s, turn = time.monotonic(), self._turn_now
        self.heard_s.append(now_s)
        if not turn.first_s:
            turn.first_s = now_s
            turn.prompt_tokens = answer.meta["prompt_tokens"]
            turn.cached_tokens = answer.meta["cached_tokens"]

    def _note(self, new: list[int], answer: Answer, told: list[int]) -> None:
        turn = self._turn_now
        turn.ended_s, turn.replayed = time.monotonic(), answer.replayed
        self.turns.append(turn)
        self.heard_s.append(turn.ended_s)
        super()._note(new, answer, told)


class PrefillTime:
    """How long the prefill of a turn takes on an idle server: the least possible wait for the first token.

    `lengths` are prompt lengths in tokens, of which none has KV; `times_s` are their times to the first token.
    """

    def __init__(self, lengths: Sequence[int], times_s: Sequence[float]) -> None:
        self.lengths, self.times_s = tuple(lengths), tuple(times_s)

    @classmethod
    async def measured(cls, client: httpx.AsyncClient) -> PrefillTime:
        """Measures with requests of its own, one after another; the quickest of PREFILL_TRIES at each length. The
        prompts are never the same, so none of them has KV."""
        rng, times_s = random.Random(), []
        for length in PREFILL_LENGTHS:
            tries_s = []
            for _ in range(PREFILL_TRIES):
                prompt = [rng.randrange(TOKENS.start, TOKENS.stop) for _ in range(length)]
                body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
                began_s = time.monotonic()
                (await client.post("/generate", json=body)).raise_for_status()
                tries_s.append(time.monotonic() - began_s)
            times_s.append(min(tries_s))
        return cls(PREFILL_LENGTHS, times_s)

    def of(self, turn: StreamedTurn) -> float:
        """Seconds for the prompt's tokens that had no KV, after those that had. The way to the server and back is not
        included."""
        return max(0.0, self._at(turn.prompt_tokens) - self._at(turn.cached_tokens))

    def _at(self, length: int) -> float:
        return float(np.interp(length, self.lengths, self.times_s))


def longest_gap_s(times_s: Iterable[float], began_s: float, ended_s: float) -> float:
    """The longest span between `began_s` and `ended_s` that contains none of the times."""
    within = sorted(at_s for at_s in times_s if began_s <= at_s <= ended_s)
    return max(after - before for before, after in pairwise([began_s, *within, ended_s]))
