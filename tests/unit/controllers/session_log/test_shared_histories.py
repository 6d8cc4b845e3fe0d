"""Forked sessions keep their common history once. What no session has any more is deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import pytest
from session_logs import opened_log, stored_bytes
from store_turns import SESSION, append_turn, history_of, turn_of

from controllers.session_log.log_cipher import KEY_BYTES, LogCipher
from controllers.session_log.store import SessionStore
from controllers.settings import LogSettings
from controllers.tokens import TOKEN_BYTES, encode_tokens

Seen = Callable[[], bytes]
"""Returns all bytes that the log stores."""

TOKENS = [random.randrange(2**31, 2**32) for random in [Random(7)] for _ in range(600)]
"""Random tokens, each of which occurs once. They are so large that they do not occur by chance."""
CIPHERS = [LogCipher(), LogCipher([bytes(KEY_BYTES)], encrypts=True)]


@pytest.fixture
def store(log: LogSettings) -> Iterator[SessionStore]:
    store = opened_log(log)
    yield store
    store.disconnect()


@pytest.fixture
def seen(log: LogSettings) -> Seen:
    return lambda: stored_bytes(log)


def left_of(seen: Seen, tokens: list[int]) -> list[int]:
    """Those of the tokens that the log still has."""
    stored = seen()
    return [token for token in tokens if encode_tokens([token]) in stored]


def forked(store: SessionStore, parent_id: str, length: int, *names: str) -> None:
    for name in names:
        store.fork(parent_id, length, replace(SESSION, session_id=name))


def test_a_hundred_forks_keep_their_parents_history_once(store: SessionStore, seen: Seen) -> None:
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, TOKENS))
    forked(store, "s", 500, *(f"child{number}" for number in range(100)))
    store.purge()
    assert len(seen()) < 30 * len(TOKENS) * TOKEN_BYTES
    assert seen().count(encode_tokens(TOKENS[:1])) == 1
    assert history_of(store, "child7") == TOKENS[:500]


def test_a_closed_session_leaves_no_byte_that_is_not_anothers(store: SessionStore, seen: Seen) -> None:
    store.open(SESSION)
    secret = b"what the model answered"
    append_turn(store, turn_of(0, 0, TOKENS, idempotency_key="k", result=secret, digest="what was asked"))
    forked(store, "s", 100, "child")
    append_turn(store, turn_of(1, 600, [2**31 - 1]))
    assert secret in seen()
    assert store.close("s")
    store.purge()
    left = seen()
    assert secret not in left
    assert b"what was asked" not in left
    assert left_of(seen, TOKENS) == TOKENS[:100]
    assert store.close("child")
    store.purge()
    assert not left_of(seen, TOKENS)


def test_a_rewound_session_leaves_no_byte_of_what_it_rewound(store: SessionStore, seen: Seen) -> None:
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, TOKENS[:10]))
    append_turn(store, turn_of(1, 10, TOKENS[10:20]))
    forked(store, "s", 20, "child")
    append_turn(store, turn_of(2, 5, [1]))
    assert left_of(seen, TOKENS[19:20]), "the child has it"
    append_turn(store, replace(turn_of(0, 3, [2]), session_id="child"))
    store.purge()
    assert (history_of(store), history_of(store, "child")) == ([*TOKENS[:5], 1], [*TOKENS[:3], 2])
    assert left_of(seen, TOKENS[:20]) == TOKENS[:5]


def test_a_rewind_into_a_turn_leaves_no_byte_of_the_turns_rest(store: SessionStore, seen: Seen) -> None:
    """The turn's tokens were kept whole: to regenerate an answer left the former answer in the log."""
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, TOKENS[:10]))
    append_turn(store, turn_of(1, 10, TOKENS[10:20]))
    append_turn(store, turn_of(2, 15, [1, 2, 3]))
    store.purge()
    assert left_of(seen, TOKENS[:20]) == TOKENS[:15]
    append_turn(store, turn_of(3, 7, []))
    store.purge()
    assert left_of(seen, TOKENS[:20]) == TOKENS[:7]
    append_turn(store, turn_of(4, 7, [4]))
    assert history_of(store) == [*TOKENS[:7], 4]


def test_deleted_answers_leave_no_byte(store: SessionStore, seen: Seen) -> None:
    store.open(SESSION)
    for index, answer in enumerate((b"the first answer", b"the second answer", b"the third answer")):
        said = turn_of(index, 2 * index, [1, 2], idempotency_key=f"k{index}", result=answer, note=b"n")
        append_turn(store, said)
    append_turn(store, turn_of(3, 5, []))
    store.forget_note("s", 0)
    store.purge()
    left = seen()
    assert b"the second answer" in left
    assert b"the first answer" not in left
    assert b"the third answer" not in left


def test_a_rewind_takes_nothing_from_a_fork_and_the_forks_end_deletes_the_rest(
    store: SessionStore, seen: Seen
) -> None:
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, TOKENS[:10]))
    forked(store, "s", 8, "child")
    append_turn(store, turn_of(1, 10, TOKENS[10:20]))
    append_turn(store, turn_of(2, 12, []))
    store.purge()
    assert left_of(seen, TOKENS[:20]) == TOKENS[:12]
    append_turn(store, turn_of(3, 5, []))
    store.purge()
    assert (history_of(store), history_of(store, "child")) == (TOKENS[:5], TOKENS[:8])
    assert left_of(seen, TOKENS[:20]) == TOKENS[:8]
    assert store.close("child")
    store.purge()
    assert left_of(seen, TOKENS[:20]) == TOKENS[:5]


def test_forks_of_forks_end_in_any_order(store: SessionStore, seen: Seen) -> None:
    random = Random(3)
    for _ in range(20):
        opened = store.open(SESSION)
        append_turn(store, turn_of(0, 0, TOKENS[:4], epoch=opened.epoch))
        expected = {"s": TOKENS[:4]}
        for number in range(12):
            parent = random.choice(sorted(expected))
            length = random.randrange(len(expected[parent]) + 1)
            name = f"child{number}"
            child = store.fork(parent, length, replace(SESSION, session_id=name))
            added = random.sample(TOKENS, 3)
            turn = turn_of(0, length, added, epoch=child.epoch)
            append_turn(store, replace(turn, session_id=name))
            expected[name] = expected[parent][:length] + added
        for name in random.sample(sorted(expected), len(expected)):
            assert {other: history_of(store, other) for other in expected} == expected
            assert store.close(name)
            del expected[name]
    store.purge()
    assert not left_of(seen, TOKENS)


def test_an_encrypted_log_tells_nothing_of_what_was_said(log: LogSettings, seen: Seen) -> None:
    for cipher in CIPHERS:
        store = opened_log(log, cipher=cipher)
        epoch = store.open(SESSION).epoch
        said = turn_of(0, 0, TOKENS, epoch=epoch, idempotency_key="k", result=b"answered", digest="wanted")
        said = replace(said, note=b"spoken")
        append_turn(store, said)
        forked(store, "s", 100, "child")
        append_turn(store, turn_of(1, 600, TOKENS[:50], epoch=epoch))
        left = seen()
        plain = cipher is CIPHERS[0]
        assert any(encode_tokens([token]) in left for token in TOKENS) == plain
        assert (b"answered" in left) == (b"wanted" in left) == (b"spoken" in left) == plain
        assert store.close("s")
        assert store.close("child")
        store.purge()
        store.disconnect()
