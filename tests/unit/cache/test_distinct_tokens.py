"""Which tokens occur in a sequence: the answer does not depend on how the sequence was made."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.distinct_tokens import DistinctTokens
from cache.token_chain import ANY_KV


@pytest.mark.parametrize("vocab_size", [3, 40, 5000])
def test_they_are_those_of_the_sequence_in_their_order(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    chain, tokens = ANY_KV.chain("", 4), list[int]()
    for _ in range(200):
        if rng.random() < 0.3:
            keep = rng.randrange(len(tokens) + 1)
            chain.cut(keep)
            del tokens[keep:]
        else:
            more = [rng.randrange(vocab_size) for _ in range(rng.choice([0, 1, 7, 90]))]
            chain.extend(more)
            tokens += more
        if rng.random() < 0.6:
            assert chain.distinct().tolist() == list(dict.fromkeys(tokens))


def test_each_token_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    extend = DistinctTokens.extend

    def counting(distinct: DistinctTokens, tokens: NDArray[np.uint32]) -> None:
        looked_at.append(len(tokens))
        extend(distinct, tokens)

    monkeypatch.setattr(DistinctTokens, "extend", counting)
    chain = ANY_KV.chain("", 16)
    chain.extend(range(1000))
    for _ in range(3):
        chain.distinct()
        chain.extend([5, 6, 7])
        chain.cut(len(chain) - 1)
    assert looked_at == [1000, 2, 2]
