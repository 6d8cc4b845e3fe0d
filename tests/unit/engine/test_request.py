"""LiveRequest and its tokens: the history is a reference, own tokens are appended, and costs do not grow with the
history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import pytest

from cache.sequence_kv import PageAccount, SequenceKV
from cache.token_chain import ANY_KV
from engine.api import GenerateRequest, LogprobParams
from engine.request import LiveRequest, TokenSequence
from tests.unit.engine.driver import greedy, request


class GuardedHistory(Sequence[int]):
    """A history that counts how many of its tokens are read."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = self.tokens[index]
        self.num_read += len(found) if isinstance(found, list) else 1
        return found


def test_tokens_are_history_then_own() -> None:
    sequence = TokenSequence([1, 2, 3, 99, 99], 3, [4, 5])
    sequence.append(6)
    whole = [1, 2, 3, 4, 5, 6]
    assert len(sequence) == 6
    assert [sequence.at(position) for position in range(6)] == whole
    for start in range(7):
        for end in range(start, 7):
            assert list(sequence.slice(start, end)) == whole[start:end]
    assert sequence.array().tolist() == whole
    assert sequence.array(4).tolist() == [1, 2, 3, 4]


def test_the_array_follows_appended_tokens() -> None:
    sequence = TokenSequence([1, 2], 2, [3])
    assert sequence.array().tolist() == [1, 2, 3]
    sequence.append(4)
    assert sequence.array().tolist() == [1, 2, 3, 4]
    assert sequence.array(2).tolist() == [1, 2]


def test_own_tokens_do_not_alias_the_request_s() -> None:
    own = [4, 5]
    sequence = TokenSequence([1], 1, own)
    sequence.append(6)
    assert own == [4, 5]


def test_reading_own_tokens_never_touches_the_history() -> None:
    history = GuardedHistory(range(1000))
    sequence = TokenSequence(history, 1000, [1, 2, 3])
    sequence.append(4)
    sequence.slice(1000, 1004)
    sequence.slice(1003, 1004)
    sequence.at(1003)
    assert history.num_read == 0
    assert sequence.slice(999, 1001) == [999, 1]
    assert history.num_read == 1, "one token short, one token read"


def test_a_waiting_request_reads_its_history_once() -> None:
    """Each step asks the tree again for the first request in the queue. This must not rebuild the request's tokens."""
    history = GuardedHistory(range(1000))
    sequence = TokenSequence(history, 1000, [1, 2, 3])
    first = sequence.array()
    for _ in range(5):
        assert np.shares_memory(sequence.array(), first)
    assert history.num_read == 1000


def test_order_is_priority_then_arrival() -> None:
    requests = [
        LiveRequest(request(name, [1], priority=priority), arrival)
        for arrival, (name, priority) in enumerate([("a", 0), ("b", 2), ("c", -1), ("d", 2)])
    ]
    assert [r.request_id for r in sorted(requests, key=lambda r: r.order)] == ["b", "d", "a", "c"]


@pytest.mark.parametrize(("input_start", "expected"), [(None, 9), (0, 0), (1, 0), (5, 4), (9, 8), (10, 9)])
def test_the_logit_reserve(input_start: int | None, expected: int) -> None:
    spec = request("r", range(10), logprobs=LogprobParams(input_start=input_start))
    assert LiveRequest(spec, 0).max_prefix_len == expected


def test_accept_counts_output_tokens() -> None:
    live = LiveRequest(request("r", [1, 2], history=[7, 7], history_len=2), 0)
    assert (live.prompt_len, live.num_output, live.num_uncomputed) == (4, 0, 4)
    live.accept(5)
    live.accept(5)
    assert (live.prompt_len, live.num_output, list(live.tokens.slice(0, 6))) == (4, 2, [7, 7, 1, 2, 5, 5])


def begun(spec: GenerateRequest, known: Sequence[int] = ()) -> LiveRequest:
    """A request that runs on KV of the tokens `known` of its history."""
    live = LiveRequest(spec, 0)
    live.kv = SequenceKV(ANY_KV.chain("", 4), PageAccount())
    live.kv.chain.extend(known)
    live.begin_run(1)
    return live


def test_penalties_go_by_what_they_need() -> None:
    assert begun(request("r", [1, 2])).seen is None
    frequency = begun(request("r", [1, 2], sampling=greedy(frequency_penalty=0.5)))
    frequency.accept(3)
    frequency.accept(3)
    assert frequency.seen is not None
    assert (frequency.seen.prompt.tolist(), frequency.seen.output) == ([], [3, 3])
    history = GuardedHistory([8, 9, 8, 7, 5])
    spec = request("r", [1, 2], sampling=greedy(repetition_penalty=1.2), history=history, history_len=4)
    for known, num_read in (([8, 9, 8], 1), ([], 4), ([8, 9, 8, 7], 0)):
        history.num_read = 0
        repetition = begun(spec, known)
        assert repetition.sample is not None
        assert repetition.sample.seen is repetition.seen
        assert repetition.seen is not None
        assert set(repetition.seen.prompt.tolist()) == {8, 9, 7, 1, 2}
        assert history.num_read == num_read, "what has KV is known to its chain"
        repetition.accept(6)
        again = repetition.seen
        repetition.begin_run(2)
        assert repetition.seen is not again
        assert repetition.seen.output == [6], "after a retraction"
