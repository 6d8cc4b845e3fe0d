"""The behaviour that every session log has, wherever it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from manual_clock import ManualClock
from session_logs import opened_log
from store_turns import SESSION, append_turn, history_of, turn_of

from controllers.errors import IdempotencyConflict, InvalidFork, SessionExists, SessionNotFound, StaleEpoch
from controllers.records import LedgerEntry, StoredResult, TurnRecord
from controllers.session_keys import tenant_in
from controllers.session_log.kept_answers import KEPT_ANSWERS
from controllers.session_log.log_cipher import KEY_BYTES, LogCipher
from controllers.session_log.store import SessionStore
from controllers.settings import LogSettings
from controllers.tokens import encode_tokens, unpack_tokens

Place = Callable[[ManualClock], SessionStore]
"""Opens the log of a place. It is the same log each time."""


@pytest.fixture(params=["plain", "encrypted"])
def place(request: pytest.FixtureRequest, log: LogSettings) -> Place:
    cipher = LogCipher([b"k" * KEY_BYTES], encrypts=request.param == "encrypted")
    return lambda clock: opened_log(log, clock, cipher)


@pytest.fixture
def store(place: Place, clock: ManualClock) -> Iterator[SessionStore]:
    store = place(clock)
    yield store
    store.disconnect()


def places_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places in the log whose values are read from now on."""
    read: list[str] = []
    decrypt = LogCipher.decrypt

    def seen(cipher: LogCipher, stored: bytes, place: str) -> bytes:
        read.append(place)
        return decrypt(cipher, stored, place)

    monkeypatch.setattr(LogCipher, "decrypt", seen)
    return read


def test_open_and_load(store: SessionStore, clock: ManualClock) -> None:
    store.open(SESSION)
    assert store.load("s") == SESSION
    assert list(store.load_all_entries()) == [
        LedgerEntry("s", "", "a", 1, 0, 0, 5.0, clock.now_s, timeout_s=30.0, capacity_tokens=99, open_key="o")
    ]
    with pytest.raises(SessionExists):
        store.open(replace(SESSION, open_key="another open"))


def test_unknown_sessions(store: SessionStore) -> None:
    with pytest.raises(SessionNotFound):
        store.load("s")
    with pytest.raises(SessionNotFound):
        append_turn(store, turn_of(0, 0, [1]))
    with pytest.raises(SessionNotFound):
        store.assign("s", "b", 2)
    with pytest.raises(SessionNotFound):
        store.touch("s", 1.0)
    assert not store.close("s")
    assert list(store.load_all_entries()) == []


def test_turns_append_and_rewind(store: SessionStore, clock: ManualClock) -> None:
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2, 3]))
    append_turn(store, turn_of(1, 3, [4, 5]))
    assert history_of(store) == [1, 2, 3, 4, 5]
    clock.advance(9)
    append_turn(store, turn_of(2, 2, [9]))
    assert history_of(store) == [1, 2, 9]
    append_turn(store, turn_of(3, 0, [7]))
    assert history_of(store) == [7]
    (entry,) = list(store.load_all_entries())
    assert (entry.tokens, entry.turns, entry.last_used_s) == (1, 4, 1009.0)


def test_repeating_the_last_turn_is_fine(store: SessionStore) -> None:
    store.open(SESSION)
    turn = turn_of(0, 0, [1, 2], idempotency_key="k", result=b"r", digest="d")
    append_turn(store, turn)
    append_turn(store, turn)
    assert history_of(store) == [1, 2]
    assert store.load("s").results == (StoredResult("k", 0, b"r", "d"),)
    rewind = turn_of(1, 1, [5])
    append_turn(store, rewind)
    append_turn(store, rewind)
    assert history_of(store) == [1, 5]


@pytest.mark.parametrize(
    "turn",
    [
        turn_of(0, 0, [1, 3]),
        turn_of(0, 0, [1]),
        turn_of(0, 0, [1, 2], idempotency_key="k"),
        turn_of(1, 3, [1]),
        turn_of(1, -1, [1]),
        turn_of(2, 2, [1]),
        turn_of(1, 2, [1], epoch=2),
        turn_of(1, 2, [1], epoch=0),
        turn_of(0, 0, [1, 2], epoch=2),
    ],
)
def test_a_turn_that_does_not_follow_is_stale(store: SessionStore, turn: TurnRecord) -> None:
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2]))
    before = store.load("s")
    with pytest.raises(StaleEpoch):
        append_turn(store, turn)
    assert store.load("s") == before


def test_a_new_owner_fences_the_former_one(store: SessionStore, clock: ManualClock) -> None:
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2]))
    used_s = store.find("s").last_used_s
    clock.advance(9)
    store.assign("s", "b", 2)
    store.assign("s", "b", 2)
    assert store.find("s").last_used_s == used_s, "a move is no use"
    for replica_id, epoch in (("c", 2), ("b", 4), ("b", 1)):
        with pytest.raises(StaleEpoch):
            store.assign("s", replica_id, epoch)
    with pytest.raises(StaleEpoch):
        append_turn(store, turn_of(1, 2, [3]))
    append_turn(store, turn_of(1, 2, [4], epoch=2))
    record = store.load("s")
    assert (record.replica_id, record.epoch, unpack_tokens(record.history).tolist()) == ("b", 2, [1, 2, 4])


def test_only_the_last_results_are_kept(store: SessionStore) -> None:
    store.open(SESSION)
    for index in range(KEPT_ANSWERS + 3):
        append_turn(store, turn_of(index, index, [index], idempotency_key=f"k{index}", result=b"%d" % index))
    results = store.load("s").results
    assert [result.turn_index for result in results] == list(range(3, KEPT_ANSWERS + 3))
    with pytest.raises(IdempotencyConflict):
        append_turn(store, turn_of(KEPT_ANSWERS + 3, 0, [1], idempotency_key="k5"))
    assert len(history_of(store)) == KEPT_ANSWERS + 3
    append_turn(store, turn_of(KEPT_ANSWERS + 3, 0, [1], idempotency_key="k0"))
    assert history_of(store) == [1]


@pytest.mark.parametrize("made", ["call-", "try-"])
def test_answers_of_turns_without_a_clients_key_push_out_no_others(store: SessionStore, made: str) -> None:
    """The last turn's answer is always kept, because a takeover may ask for it."""
    store.open(SESSION)
    clients = [f"mine{number}" for number in range(KEPT_ANSWERS + 1)]
    others = [f"{made}{number:032x}" for number in range(2 * KEPT_ANSWERS)]
    for index, key in enumerate([*clients, *others]):
        append_turn(store, turn_of(index, index, [index], idempotency_key=key, result=b"%d" % index))
        assert store.load("s").results[-1] == StoredResult(key, index, b"%d" % index)
    kept = [result.idempotency_key for result in store.load("s").results]
    assert kept == [*clients[1:], *others[-KEPT_ANSWERS:]]
    index = len(clients) + len(others)
    for key in (clients[1], others[-KEPT_ANSWERS]):
        with pytest.raises(IdempotencyConflict):
            append_turn(store, turn_of(index, index, [1], idempotency_key=key))


def test_turns_in_a_group_are_taken_or_refused_each_by_itself(store: SessionStore) -> None:
    """It is as if one came after the other. The group also has turns of one session: repeated, rewound, and after a
    refusal."""
    for name in ("s", "t", "u"):
        store.open(replace(SESSION, session_id=name))
    append_turn(store, turn_of(0, 0, [1, 2], idempotency_key="k", result=b"first"))
    group = [
        turn_of(1, 2, [3], idempotency_key="k"),
        turn_of(0, 0, [7], session_id="t", idempotency_key="k", result=b"t"),
        turn_of(1, 2, [3], idempotency_key="l", result=b"l"),
        turn_of(1, 2, [3], idempotency_key="l", result=b"l"),
        turn_of(0, 0, [7], session_id="nobody"),
        turn_of(2, 1, [4, 5]),
        turn_of(0, 0, [7], session_id="u", epoch=3),
        turn_of(4, 3, [6]),
        turn_of(1, 1, [8], session_id="t"),
    ]
    outcomes = store.append_turns(group)
    assert [type(outcome) for outcome in outcomes] == [
        IdempotencyConflict,
        type(None),
        type(None),
        type(None),
        SessionNotFound,
        type(None),
        StaleEpoch,
        StaleEpoch,
        type(None),
    ]
    assert [history_of(store, name) for name in ("s", "t", "u")] == [[1, 4, 5], [7, 8], []]
    assert [(kept.idempotency_key, kept.result) for kept in store.load("s").results] == [
        ("k", b""),  # cut later in the group
        ("l", b""),
    ]
    assert store.load("t").results == (StoredResult("k", 0, b"t"),)
    assert store.append_turns([]) == []


def kept_of(store: SessionStore) -> dict[str, bytes]:
    return {kept.idempotency_key: kept.result for kept in store.load("s").results}


def test_a_rewind_deletes_the_answers_of_turns_that_it_cuts_and_keeps_their_keys(store: SessionStore) -> None:
    """The answers stayed in the log, although their tokens were deleted."""
    store.open(SESSION)
    for index in range(3):
        turn = turn_of(index, 2 * index, [1, 2], idempotency_key=f"k{index}", result=b"%d" % index, note=b"n")
        append_turn(store, turn)
    back = turn_of(3, 3, [7], idempotency_key="k3", result=b"3", note=b"n")
    append_turn(store, back)
    append_turn(store, back)
    assert kept_of(store) == {"k0": b"0", "k1": b"", "k2": b"", "k3": b"3"}
    with pytest.raises(IdempotencyConflict):
        append_turn(store, turn_of(4, 4, [1], idempotency_key="k1"))
    append_turn(store, turn_of(4, 2, [], idempotency_key="k4"))
    assert kept_of(store) == {"k0": b"0", "k1": b"", "k2": b"", "k3": b"", "k4": b""}
    append_turn(store, turn_of(5, 2, [8]))
    assert kept_of(store)["k0"] == b"0", "it is still whole"


def test_a_turn_whose_end_is_not_known_counts_as_cut(store: SessionStore) -> None:
    """Earlier versions wrote turns without notes."""
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1], idempotency_key="k", result=b"r"))
    append_turn(store, turn_of(1, 1, [2, 3]))
    append_turn(store, turn_of(2, 2, [4]))
    assert kept_of(store) == {"k": b""}


def test_a_fork_does_not_change_what_a_rewind_deletes_of_the_answers(store: SessionStore) -> None:
    store.open(SESSION)
    for index in range(3):
        turn = turn_of(index, 2 * index, [1, 2], idempotency_key=f"k{index}", result=b"%d" % index, note=b"n")
        append_turn(store, turn)
    store.fork("s", 6, replace(SESSION, session_id="child"))
    append_turn(store, turn_of(3, 4, []))
    assert kept_of(store) == {"k0": b"0", "k1": b"1", "k2": b""}
    assert history_of(store, "child") == [1, 2, 1, 2, 1, 2]


def test_a_forgotten_note_takes_its_turns_answer_along_and_not_its_key(store: SessionStore) -> None:
    """A deleted response was still in the log: as the answer that is sent again."""
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1], idempotency_key="k0", result=b"0", note=b"n"))
    append_turn(store, turn_of(1, 1, [2], idempotency_key="k1", result=b"1", note=b"n"))
    store.forget_note("s", 0)
    assert kept_of(store) == {"k0": b"", "k1": b"1"}
    assert [note.note for note in store.notes("s")] == [b"", b"n"]


def test_touch(store: SessionStore) -> None:
    store.open(SESSION)
    store.touch("s", 4321.5)
    assert store.find("s").last_used_s == 4321.5


def test_close_deletes_everything(store: SessionStore) -> None:
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1], idempotency_key="k"))
    assert store.close("s")
    assert not store.close("s")
    store.open(SESSION)
    assert store.load("s") == replace(SESSION, epoch=2)


def test_tools_are_those_of_the_turn_that_begins_the_history(store: SessionStore) -> None:
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2, 3], tools="first"))
    append_turn(store, turn_of(1, 3, [4], tools="first"))
    append_turn(store, turn_of(2, 4, [5]))
    assert store.load("s").tools == "first"
    store.fork("s", 2, replace(SESSION, session_id="child"))
    assert store.load("child").tools == "first"
    append_turn(store, turn_of(3, 0, [6], tools="second"))
    assert store.load("s").tools == "second", "rewound to nothing, it began anew"
    append_turn(store, turn_of(4, 0, [6]))
    assert store.load("s").tools is None
    assert store.load("child").tools == "first"


def test_epochs_of_closed_sessions_are_remembered(place: Place, clock: ManualClock) -> None:
    store = place(clock)
    store.open(SESSION)
    store.assign("s", "b", 2)
    assert store.open(replace(SESSION, session_id="beside")).epoch == 1, "no session is closed yet"
    store.close("s")
    assert store.open(SESSION).epoch == 3, "above whoever owned its namesake"
    assert store.load("s").epoch == 3
    child = store.fork("s", 0, replace(SESSION, session_id="child"))
    assert child.epoch == store.load("child").epoch == 3
    assert store.open(replace(SESSION, session_id="later", epoch=9)).epoch == 9
    store.close("s")
    store.disconnect()
    reopened = place(clock)
    assert reopened.open(SESSION).epoch == 4
    reopened.disconnect()


def test_a_session_of_this_cluster_is_found_and_needs_no_claim(store: SessionStore) -> None:
    for unknown in (lambda: store.find("s"), lambda: store.claim("s", "b")):
        with pytest.raises(SessionNotFound):
            unknown()
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2]))
    (entry,) = list(store.load_all_entries())
    assert store.find("s") == store.claim("s", "b") == entry
    assert (entry.replica_id, entry.epoch) == ("a", 1)
    assert not store.changes().taken


def test_forks(store: SessionStore) -> None:
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2, 3], idempotency_key="k", result=b"r"))
    append_turn(store, turn_of(1, 1, [4]))
    child = replace(SESSION, session_id="child", open_key=None)
    for length in (-1, 3):
        with pytest.raises(InvalidFork, match="history has 2 tokens"):
            store.fork("s", length, child)
    assert store.fork("s", 2, child) == store.find("child")
    assert store.find("child").tokens == 2
    assert store.load("child") == replace(child, history=encode_tokens([1, 4]))
    with pytest.raises(SessionExists):
        store.fork("s", 2, child)
    store.fork("s", 0, replace(child, session_id="empty"))
    store.close("s")
    with pytest.raises(SessionNotFound):
        store.fork("s", 0, replace(child, session_id="late"))
    first = TurnRecord("child", 1, 0, 2, encode_tokens([9]), 1)
    for _ in range(2):
        append_turn(store, first)
    assert unpack_tokens(store.load("child").history).tolist() == [1, 4, 9]
    assert sorted(entry.session_id for entry in list(store.load_all_entries())) == ["child", "empty"]


def test_what_is_kept_outlives_the_store(place: Place, clock: ManualClock) -> None:
    store = place(clock)
    store.open(SESSION)
    for index in range(20):
        append_turn(store, turn_of(index, index, [index], idempotency_key=f"k{index}", digest=f"d{index}"))
    before = store.load("s"), list(store.load_all_entries())
    store.disconnect()
    again = place(clock)
    assert (again.load("s"), list(again.load_all_entries())) == before
    again.disconnect()


def test_texts_and_bytes_of_every_kind(store: SessionStore) -> None:
    names = ["täglich", "a:b", "{x}", "a b", "\n", "\0", "*", "日本", "-1"]
    results = [b"", b"\n", b"\0\xff", bytes(range(256))]
    for name in names:
        store.open(replace(SESSION, session_id=name, tenant=tenant_in(name), open_key=name))
        for index, result in enumerate(results):
            record = turn_of(index, index, [2**32 - 1], idempotency_key=f"{name}{index}", result=result)
            append_turn(store, replace(record, session_id=name, digest=name, tools=name))
    for name in names:
        record = store.load(name)
        assert (record.tenant, record.open_key, record.tools) == (tenant_in(name), name, name)
        assert [kept.result for kept in record.results] == results
        assert {kept.digest for kept in record.results} == {name}
    assert {entry.session_id for entry in list(store.load_all_entries())} == set(names)
    assert all(store.close(name) for name in names)
    assert list(store.load_all_entries()) == []


def test_an_answer_that_a_turn_without_a_note_cuts_ends_there(store: SessionStore) -> None:
    """The note used to end where the history did, past the tokens that had replaced the rest of its answer."""
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2, 3, 4], note=b"said"))
    append_turn(store, turn_of(1, 3, [9, 9]))
    assert [(note.turn_index, note.asked_len, note.end_len) for note in store.notes("s")] == [(0, 2, 3)]


def test_it_still_ends_there_when_forks_share_the_history(store: SessionStore) -> None:
    """Where the replacing turn began is not known in Redis once the history has become a segment."""
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2, 3, 4], note=b"said"))
    append_turn(store, turn_of(1, 3, [5, 6]))
    store.fork("s", 5, replace(SESSION, session_id="child"))
    for session_id in ("s", "child"):
        assert [(note.asked_len, note.end_len) for note in store.notes(session_id)] == [(2, 3)]


def test_notes_are_read_in_pages_that_read_no_others(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a session's notes used to read all of them: the controller did nothing else meanwhile."""
    store.open(SESSION)
    for index in range(12):
        append_turn(store, turn_of(index, index, [index], note=b"n" * 1000 * (5 if index == 4 else 1)))
    whole = list(store.notes("s"))
    read = places_read(monkeypatch)
    pages: list[list[int]] = []
    after: int | None = None
    while page := list(store.notes_after("s", after, 3500)):
        pages.append([note.turn_index for note in page])
        assert page == whole[page[0].turn_index : page[-1].turn_index + 1]
        assert sum(place.startswith("what turn") for place in read) == len(page)
        after = page[-1].turn_index
        read.clear()
    assert pages == [[0, 1, 2], [3], [4], [5, 6, 7], [8, 9, 10], [11]]


@pytest.mark.parametrize("back", [1, 3, 40, 250, 599])
def test_a_rewind_in_a_long_session(store: SessionStore, back: int) -> None:
    store.open(SESSION)
    for index in range(200):
        append_turn(store, turn_of(index, 3 * index, [index] * 3, note=b"n"))
    append_turn(store, turn_of(200, 600 - back, [7], note=b"n"))
    assert history_of(store) == [*(at // 3 for at in range(600 - back)), 7]
    notes = list(store.notes("s"))
    assert notes[-1].turn_index == 200
    # A turn's note stays while its input, of one token, is left.
    assert [(note.turn_index, note.end_len) for note in notes[:-1]] == [
        (index, min(3 * index + 3, 600 - back)) for index in range(200) if 3 * index + 1 <= 600 - back
    ]


def test_a_rewind_into_the_last_turn_reads_no_earlier_ones(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each used to read all notes of the session in Redis, and looked at all of its turns in either log."""
    store.open(SESSION)
    for index in range(40):
        append_turn(store, turn_of(index, 3 * index, [index] * 3, note=b"n"))
    read = places_read(monkeypatch)
    append_turn(store, turn_of(40, 119, [7], note=b"n"))
    earlier = {f"turn {index} of s" for index in range(38)}
    assert not earlier & {place.removeprefix("what ").removesuffix(" said") for place in read}


def test_a_page_of_notes_of_an_unknown_session(store: SessionStore) -> None:
    with pytest.raises(SessionNotFound):
        store.notes_after("s", None, 1000)
