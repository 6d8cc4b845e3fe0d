"""The measurements of one turn, and of a whole run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from serving.cli.client.stream import TokenCounts
from serving.cli.load.machine import CpuShares


@dataclass(frozen=True, slots=True)
class TurnSample:
    """One turn as the client saw it. `turn` counts from 1. Times are seconds on `time.perf_counter`.

    `token_times_s` holds the arrival of every chunk that carried at least one token.
    """

    session: int
    turn: int
    started_s: float
    ended_s: float
    token_times_s: tuple[float, ...] = ()
    usage: TokenCounts | None = None
    text: str = ""
    token_ids: tuple[int, ...] = ()
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token. Only for turns without an error."""
        return self.token_times_s[0] - self.started_s

    @property
    def output_tokens(self) -> int:
        """The server's count; the number of chunks if the server does not report it."""
        return self.usage.completion_tokens if self.usage is not None else len(self.token_times_s)

    @property
    def gaps_s(self) -> list[float]:
        """Times between chunks that carried tokens."""
        times = self.token_times_s
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def time_per_token_s(self) -> float | None:
        """Mean over the turn's tokens after the first; None for turns of one token or one chunk."""
        if self.output_tokens < 2 or len(self.token_times_s) < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Every measured turn, and who used the processors.

    `wall_s`: from the first request to the last answer. `lateness_s`: how late the client's own timers were.
    """

    samples: tuple[TurnSample, ...]
    wall_s: float
    cpu: CpuShares | None
    lateness_s: tuple[float, ...] = ()
