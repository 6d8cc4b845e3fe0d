"""A session's history has a chain for the adapter of its last turn. It is made anew only when that changes."""

from __future__ import annotations

import pytest
from session_book import make_chain

from cache.token_chain import TokenChain
from controllers.errors import TurnInFlight
from controllers.records import SessionRecord
from controllers.session import SessionController
from controllers.turns import Fork, Turn


class Book:
    """A session book that notes for which adapters it makes chains."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.sessions = SessionController(lambda: 0.0, 60.0, make_chain=self._make)
        self.sessions.adopt(SessionRecord("s", "acme", 1, replica_id=""))

    def _make(self, tenant: str, adapter: str) -> TokenChain:
        assert tenant == "acme"
        self.made.append(adapter)
        return make_chain(tenant, adapter)

    def turn(self, tokens: list[int], **options: str | None) -> Turn:
        turn = self.sessions.begin_turn("s", 1, **options)  # type: ignore[arg-type]
        assert isinstance(turn, Turn)
        self.sessions.commit_turn(turn, self.sessions.prepare_commit(turn, tokens, [], b""))
        return turn


def same(chain: object, adapter: str, tokens: list[int]) -> bool:
    expected = make_chain("acme", adapter)
    expected.extend(tokens)
    assert isinstance(chain, TokenChain)
    return chain.common_len(expected) == len(expected) == len(chain)


def test_a_chain_is_made_when_the_adapter_changes_and_not_else() -> None:
    book, history = Book(), list[int]()
    for number, adapter in enumerate(("", "a", "a", "b", "")):
        turn = book.turn([number, 7, 7], adapter=adapter)
        history += [number, 7, 7]
        assert same(turn.chain, adapter, history)
        assert list(turn.history) == history
    assert book.made == ["", "a", "b", ""]


def test_a_turn_that_does_not_run_keeps_the_chain() -> None:
    book = Book()
    book.turn([1, 2, 3], adapter="a")
    assert same(book.turn([]).chain, "a", [1, 2, 3])
    assert book.made == ["", "a"]


def test_a_refused_turn_leaves_the_chain_to_the_one_in_flight() -> None:
    book = Book()
    book.turn([1, 2, 3], adapter="a")
    turn = book.sessions.begin_turn("s", 1, adapter="a")
    with pytest.raises(TurnInFlight):
        book.sessions.begin_turn("s", 1, adapter="b")
    assert isinstance(turn, Turn)
    assert same(turn.chain, "a", [1, 2, 3])


def test_a_fork_has_its_parent_s_chain() -> None:
    book = Book()
    book.turn([1, 2, 3], adapter="a")
    fork = book.sessions.begin_fork("s", 1, 2)
    assert isinstance(fork, Fork)
    book.sessions.finish_fork(fork, SessionRecord("child", "acme", 1, replica_id=""))
    turn = book.sessions.begin_turn("child", 1, adapter="a")
    assert isinstance(turn, Turn)
    assert same(turn.chain, "a", [1, 2])
    assert book.made == ["", "a"]
