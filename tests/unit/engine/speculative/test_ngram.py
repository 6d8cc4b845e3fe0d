"""The index against a plain search through the whole sequence: after appends, growth and removals."""

from __future__ import annotations

import random
import time

import pytest

from engine.speculative import ngram
from engine.speculative.ngram import FEW_TOKENS, LONGEST_MATCH, Match, NgramIndex


def search(tokens: list[int], size: int, count: int) -> Match | None:
    """The longest earlier match of the end of `tokens`, the latest of equal ones, and what followed it."""
    best: tuple[int, int] | None = None
    for place in range(len(tokens) - 1, size - 1, -1):
        length = 0
        while length < min(LONGEST_MATCH, place) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= size and (best is None or length > best[0]):
            best = (length, place)
    if best is None:
        return None
    grown = list(tokens)
    for offset in range(count):
        grown.append(grown[best[1] + offset])
    return Match(tuple(grown[len(tokens) :]), best[0])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_it_finds_what_a_search_finds(size: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MOST_CANDIDATES", 10**9)
    draw = random.Random(seed)
    index, tokens = NgramIndex(size), list[int]()
    for _ in range(150):
        if draw.random() < 0.3:
            length = draw.randint(0, len(tokens) + 2)
            index.truncate(length)
            del tokens[length:]
        else:
            count = draw.choice([0, 1, 1, 2, 5, FEW_TOKENS + 30])
            new = [draw.randrange(2 + seed) for _ in range(count)]
            index.extend(new)
            tokens += new
        assert len(index) == len(tokens)
        assert index.tail(5) == tokens[-5:]
        for count in (1, 7):
            assert index.propose(count) == search(tokens, size, count)


def test_taking_back_restores_the_index_exactly() -> None:
    draw = random.Random(3)
    index = NgramIndex(3)
    index.extend([draw.randrange(5) for _ in range(100)])
    before = (index._head[:], index._previous[:], index._tokens[:])
    for count in (1, 3, 20):
        index.extend([draw.randrange(5) for _ in range(count)])
        index.truncate(100)
        assert (index._head, index._previous, index._tokens) == before


def test_many_at_once_is_one_by_one() -> None:
    draw = random.Random(4)
    tokens = [draw.randrange(30) for _ in range(3000)]
    whole, single = NgramIndex(2), NgramIndex(2)
    whole.extend(tokens[:10])
    whole.extend(tokens[10:])
    for token in tokens:
        single.extend([token])
    whole._rebuild()  # rebuilt with as many slots as the other may have
    single._rebuild()
    assert (whole._head, whole._previous) == (single._head, single._previous)
    assert whole.propose(6) == single.propose(6) is not None


def test_periodic_text_goes_on_through_its_own_end() -> None:
    index = NgramIndex(2)
    index.extend([9, 1, 2, 3, 1, 2, 3])
    assert index.propose(8) == Match((1, 2, 3, 1, 2, 3, 1, 2), 3)
    index.extend([7])
    assert index.propose(8) is None
    assert index.propose(0) is None


def test_longer_matches_go_first() -> None:
    index = NgramIndex(2)
    index.extend([5, 6, 1, 2, 30, 8, 1, 2, 40, 5, 6, 1, 2])
    assert index.propose(1) == Match((30,), 4)


def test_costs_do_not_grow_with_the_sequence() -> None:
    """An append and a lookup in 400,000 tokens cost what they cost in 4,000, with much slack."""
    costs_s = []
    for length in (4_000, 400_000):
        draw = random.Random(length)
        index = NgramIndex(3)
        begin_s = time.process_time()
        index.extend([draw.randrange(50) for _ in range(length)])
        assert time.process_time() - begin_s < 5.0
        rounds_s = []
        for _ in range(20):
            begin_s = time.process_time()
            for _ in range(50):
                index.extend([draw.randrange(50)])
                index.propose(8)
            rounds_s.append(time.process_time() - begin_s)
        costs_s.append(min(rounds_s))
    assert costs_s[1] < 10 * costs_s[0]
