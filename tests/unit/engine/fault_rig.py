"""Helpers for the tests of known faults: drafts that are right or wrong on demand, and a watch on the begin and end of
each turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cache.journal import Holder
from cache.sequence_kv import SequenceKV, pages_for
from cache.session_cache import CacheMatch
from cache.token_chain import Tokens
from engine.request import LiveRequest
from engine.speculative.proposers import NOTHING, Proposal
from tests.unit.engine.driver import VOCAB, Driver, Talk
from tests.unit.engine.null_runner import null_generate

PAGE_SIZES = (1, 4, 16, 64, 256)


class Listener:
    """The notifications of a Proposer, all ignored. It is a base for proposers that already know what to propose."""

    def begin(self, request: LiveRequest) -> None: ...

    def may_propose(self, request: LiveRequest) -> bool:  # noqa: ARG002
        return True

    def observe(self, request: LiveRequest, proposed: int, accepted: int) -> None: ...

    def commit(self, request: LiveRequest) -> None: ...

    def rollback(self, request: LiveRequest) -> None: ...

    def forget(self, session_id: str) -> None: ...


class Guesser(Listener):
    """Proposes `right` tokens that the model will pick, then `wrong` tokens that it will not. With `heeds_limit` False
    it exceeds the limit."""

    def __init__(self, right: int, wrong: int = 0, *, heeds_limit: bool = True) -> None:
        self.right = right
        self.wrong = wrong
        self.heeds_limit = heeds_limit

    def propose(self, request: LiveRequest, limit: int) -> Proposal:
        known = request.tokens.slice(0, len(request.tokens))
        tokens = null_generate(known, self.right + self.wrong, VOCAB, params=request.spec.sampling)
        tokens[self.right :] = [1 + token % (VOCAB - 1) for token in tokens[self.right :]]
        tokens = tokens[:limit] if self.heeds_limit else tokens
        return Proposal(tuple(tokens)) if tokens else NOTHING


def driver_of(page_size: int, **options: Any) -> Driver:
    """A driver with a pool of 2048 tokens, but of at least 24 pages."""
    options.setdefault("num_pages", max(24, 2048 // page_size))
    options.setdefault("context_len", 4096)
    return Driver(page_size=page_size, chunk_size=64, max_batch_tokens=128, **options)


def full_page_history(talk: Talk, page_size: int, **options: Any) -> None:
    """Runs a first turn after which the session's last token is the first of a page. That token has no KV and no page
    yet."""
    end = 2 * page_size + 1 if page_size > 1 else 9
    talk.turn([1 + n % 90 for n in range(end - 4)], 4, **options)
    assert (len(talk.history) - 1) % page_size == 0


@dataclass(frozen=True)
class Tail:
    """The tokens and pages that a sequence had past `length` before they were freed. `length` is the KV that is
    kept."""

    length: int
    num_tokens: int
    num_pages: int

    @classmethod
    def of(cls, kv: SequenceKV, length: int) -> Tail:
        return cls(length, kv.allocated_len - length, kv.num_pages - pages_for(length, kv.page_size))


class Watch:
    """Records the tail that is freed when a turn begins on its slot (`begun`) and when it gives its KV back to the slot
    (`parked`). Checks that nothing of the tail is left."""

    def __init__(self, driver: Driver) -> None:
        self.begun: list[Tail] = []
        self.parked: list[Tail] = []
        self._cache = driver.cache
        self._free_tail, self._park = driver.cache._free_tail, driver.cache._park
        self._begin = driver.cache.begin
        driver.cache._free_tail = self.free_tail  # type: ignore[method-assign]
        driver.cache._park = self.park  # type: ignore[method-assign]
        driver.cache.begin = self.begin  # type: ignore[method-assign]

    def begin(self, match: CacheMatch, holder: Holder) -> SequenceKV:
        before = len(self.begun)
        kv = self._begin(match, holder)
        assert len(self.begun) == before + match.from_slot, "once a turn"
        return kv

    def free_tail(self, kv: SequenceKV, prefix_len: int) -> None:
        self.begun.append(Tail.of(kv, prefix_len))
        self._free_tail(kv, prefix_len)
        _assert_no_tail(kv, prefix_len)

    def park(self, session_id: str, kv: SequenceKV, tokens: Tokens) -> None:
        self.parked.append(Tail.of(kv, kv.committed_len))
        self._park(session_id, kv, tokens)
        _assert_no_tail(kv, kv.committed_len)


def _assert_no_tail(kv: SequenceKV, length: int) -> None:
    pages = pages_for(length, kv.page_size)
    assert (kv.committed_len, kv.allocated_len, kv.num_pages) == (length, length, pages)
    assert kv.window is None or kv.window.num_pages == pages
