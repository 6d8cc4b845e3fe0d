"""Chain hashes are equal for equal tokens of one tenant and model, and different otherwise. Also what a turn pays for
them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import token_chain
from cache.history import History
from cache.token_chain import ANY_KV, DIGEST_BYTES, KVIdentity, TokenChain

PAGE_SIZES = (1, 4, 16, 256)
IDENTITY = KVIdentity("weights", "float16")


def chain_of(
    tokens: Sequence[int], page_size: int = 4, tenant: str = "", identity: KVIdentity = ANY_KV
) -> TokenChain:
    chain = identity.chain(tenant, page_size)
    chain.extend(tokens)
    return chain


def hashes(chain: TokenChain) -> list[bytes]:
    return [chain.page_hash(index) for index in range(chain.num_pages)]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_hashes_depend_on_the_tokens_and_not_on_how_they_came(page_size: int) -> None:
    rng = random.Random(page_size)
    tokens = [rng.randrange(2**32) for _ in range(3 * page_size + page_size // 2)]
    whole = chain_of(tokens, page_size)
    assert (len(whole), whole.num_pages) == (len(tokens), -(-len(tokens) // page_size))
    for _ in range(20):
        pieces = chain_of([], page_size)
        while len(pieces) < len(tokens):
            pieces.extend(tokens[len(pieces) : len(pieces) + rng.randrange(2 * page_size + 1)])
            if rng.random() < 0.3:
                pieces.cut(rng.randrange(len(pieces) + 1))
        assert hashes(pieces) == hashes(whole)


def test_a_page_s_hash_covers_all_before_it() -> None:
    tokens = list(range(18))
    before = hashes(chain_of(tokens))
    for position in range(18):
        tokens[position] += 100
        after = hashes(chain_of(tokens))
        tokens[position] -= 100
        assert [a == b for a, b in zip(after, before, strict=True)] == [i < position // 4 for i in range(5)]


def test_the_part_filled_page_has_a_hash_of_what_it_holds_so_far() -> None:
    chain = chain_of([1, 2, 3, 4, 5])
    seen = {chain.page_hash(1)}
    for token in (6, 7, 8):
        chain.extend([token])
        seen.add(chain.page_hash(1))
    assert len(seen) == 4
    assert all(len(digest) == DIGEST_BYTES for digest in seen)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"no page {index} in 8 tokens"):
            chain.page_hash(index)


@pytest.mark.parametrize(
    ("tenant", "identity", "page_size"),
    [
        ("other", IDENTITY, 4),
        ("", replace(IDENTITY, weights="others"), 4),
        ("", replace(IDENTITY, kv_format="float8"), 4),
        ("", IDENTITY, 2),
        # Fields whose texts joined would be equal.
        ("", KVIdentity("weightsf", "loat16"), 4),
    ],
)
def test_another_tenant_model_or_layout_has_no_hash_in_common(
    tenant: str, identity: KVIdentity, page_size: int
) -> None:
    tokens = range(10)
    mine, other = chain_of(tokens, 4, "", IDENTITY), chain_of(tokens, page_size, tenant, identity)
    assert not set(hashes(mine)) & set(hashes(other))
    assert (mine.common_len(other), other.common_len(mine)) == (0, 0)
    assert (mine.common_len(mine), chain_of(tokens, 4, "", IDENTITY).common_len(mine)) == (10, 10)


def test_hashes_are_the_same_in_every_process() -> None:
    """Replicas compare the hashes, and later versions will. So a change needs a new scheme."""
    chain = chain_of([1, 2, 3, 4, 500_000], 4, "tenant", IDENTITY)
    assert [digest.hex() for digest in hashes(chain)] == EXPECTED


EXPECTED = ["d5aff49e00776c2e3d742507a95e95dc", "7c67168a38d56b5c6f9c1455a220bde0"]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_common_len_is_exact_to_the_token(page_size: int) -> None:
    rng = random.Random(page_size)
    for _ in range(300):
        shared = [rng.randrange(9) for _ in range(rng.randrange(5 * page_size))]
        tails = [[rng.randrange(9) for _ in range(rng.randrange(3 * page_size))] for _ in "ab"]
        left, right = shared + tails[0], shared + tails[1]
        expected = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
        expected = min(len(left), len(right)) if expected is None else expected
        assert chain_of(left, page_size).common_len(chain_of(right, page_size)) == expected


def test_a_cut_forgets_and_a_copy_is_its_own() -> None:
    chain = chain_of(range(11))
    copy = chain.prefix(7)
    assert hashes(copy) == hashes(chain_of(range(7)))
    copy.extend([99])
    chain.cut(100)
    assert (len(chain), len(copy), hashes(chain)) == (11, 8, hashes(chain_of(range(11))))
    chain.cut(5)
    assert (len(chain), hashes(chain)) == (5, hashes(chain_of(range(5))))
    chain.cut(0)
    assert (len(chain), chain.num_pages, len(chain.prefix(3))) == (0, 0, 0)


def test_arrays_and_lists_are_the_same_tokens() -> None:
    assert hashes(chain_of(np.arange(9, dtype=np.int32))) == hashes(chain_of(list(range(9))))  # type: ignore[arg-type]


def test_a_turn_costs_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost is counted in hashed bytes. A million tokens of history cost as much as a thousand."""
    hashed = [0]
    blake2b = token_chain.blake2b

    def counting(data: bytes, **options: object) -> object:
        hashed[0] += len(data)
        return blake2b(data, **options)  # type: ignore[arg-type]

    costs = []
    for length in (16 * 60, 16 * 60_000):
        book, kv = (chain_of(np.arange(length, dtype=np.int32), 16) for _ in "ab")  # type: ignore[arg-type]
        with monkeypatch.context() as patched:
            patched.setattr(token_chain, "blake2b", counting)
            hashed[0] = 0
            assert kv.common_len(book) == length
            for chain in (book, kv):
                chain.extend(range(24))
            costs.append(hashed[0])
    assert costs[0] == costs[1] <= 2 * 2 * (64 + DIGEST_BYTES)


def test_a_long_history_that_differs_is_found_in_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.arange(2**16, dtype=np.int32)
    other = tokens.copy()
    other[12_345:] += 1
    left, right = chain_of(tokens, 4), chain_of(other, 4)  # type: ignore[arg-type]
    looks = [0]
    link = TokenChain._link

    def counting(chain: TokenChain, index: int) -> bytes:
        looks[0] += 1
        return link(chain, index)

    monkeypatch.setattr(TokenChain, "_link", counting)
    assert left.common_len(right) == 12_345
    assert looks[0] <= 2 * 16


class Lent(list[int]):
    """A history that counts how often it is read."""

    reads = 0

    def __getitem__(self, part):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().__getitem__(part)


def test_a_history_without_a_chain_is_hashed_once_and_only_if_there_is_kv() -> None:
    tokens = Lent(range(50))
    history = History(tokens, 40)
    assert tokens.reads == 0
    assert [history.agreed_len(chain_of(range(length))) for length in (50, 30, 0)] == [40, 30, 0]
    assert tokens.reads == 1
    assert History(tokens, 0).agreed_len(chain_of(range(9))) == 0
    assert tokens.reads == 1


def test_a_history_s_chain_may_reach_further_than_the_turn_keeps() -> None:
    """A rewound turn brings the chain of the session book, which is cut only at the commit."""
    history = History([], 6, chain_of(range(20)))
    assert history.agreed_len(chain_of(range(15))) == 6
    assert history.agreed_len(chain_of([0, 1, 2, 9])) == 3


@given(st.lists(st.integers(0, 2**32 - 1), max_size=30), st.slices(30), st.integers(0, 30))
def test_a_chains_tokens_read_like_a_list(tokens: list[int], part: slice, cut: int) -> None:
    """They are a view of the chain, not a copy: they change with it."""
    chain = chain_of(tokens)
    read = chain.tokens
    assert (len(read), list(read)) == (len(tokens), tokens)
    assert list(read[part]) == tokens[part]
    assert np.array_equal(np.asarray(read[part]), np.array(tokens[part], dtype=np.uint32))
    for index in range(-len(tokens), len(tokens)):
        assert read[index] == tokens[index]
        assert type(read[index]) is int
    with pytest.raises(IndexError):
        read[len(tokens)]
    chain.cut(cut)
    chain.extend([7, 8])
    assert list(read) == [*tokens[:cut], 7, 8]
