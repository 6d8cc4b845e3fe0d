from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from manual_clock import ManualClock
from session_book import PAGE_SIZE, make_chain

from cache.token_chain import DIGEST_BYTES, ChainedTokens, TokenChain
from controllers.errors import (
    CapacityExceeded,
    IdempotencyConflict,
    InvalidRewind,
    SessionClosing,
    SessionNotFound,
    StaleEpoch,
    TurnInFlight,
    TurnNotInFlight,
)
from controllers.records import COUNTED_KEY, SessionRecord, StoredResult, TurnRecord
from controllers.session import TRIED_AGAIN_WITHIN_S, SessionController
from controllers.session_log.kept_answers import KEPT_ANSWERS
from controllers.tokens import encode_tokens, unpack_tokens
from controllers.turns import Replay, Turn

TIMEOUT_S = 60.0


@pytest.fixture
def controller(clock: ManualClock) -> SessionController:
    return SessionController(clock, TIMEOUT_S, make_chain=make_chain)


def _record(history: list[int] | None = None, **changes: object) -> SessionRecord:
    fields = {"session_id": "s", "tenant": "t", "epoch": 1, "replica_id": "r"} | changes
    return SessionRecord(history=encode_tokens(history or []), **fields)


def _begin(controller: SessionController, **options: object) -> Turn:
    turn = controller.begin_turn("s", 1, **options)
    assert isinstance(turn, Turn)
    return turn


def _run_turn(
    controller: SessionController, new: list[int], output: list[int], **options: object
) -> TurnRecord:
    turn = _begin(controller, **options)
    record = controller.prepare_commit(turn, new, output, b"result of %d" % turn.turn_index)
    controller.commit_turn(turn, record)
    return record


def _history(controller: SessionController) -> list[int]:
    turn = _begin(controller)
    history = list(turn.history[: turn.history_len])
    controller.abort_turn(turn)
    return history


def test_turns_append(controller: SessionController) -> None:
    controller.adopt(_record())
    first = _run_turn(controller, [1, 2], [3])
    second = _run_turn(controller, [4], [5, 6])
    assert _history(controller) == [1, 2, 3, 4, 5, 6]
    assert (first.turn_index, first.start_len, first.input_len, first.end_len) == (0, 0, 2, 3)
    assert (second.turn_index, second.start_len, second.input_len, second.end_len) == (1, 3, 1, 6)
    assert unpack_tokens(second.tokens).tolist() == [4, 5, 6]
    assert controller.committed_len("s") == 6


def test_an_adopted_history_is_continued(controller: SessionController) -> None:
    controller.adopt(_record([7, 8], turns=3, epoch=1))
    turn = _begin(controller)
    assert (list(turn.history), turn.history_len, turn.turn_index) == ([7, 8], 2, 3)


def test_history_is_lent_not_copied(controller: SessionController) -> None:
    controller.adopt(_record([1]))
    first = _begin(controller)
    controller.commit_turn(first, controller.prepare_commit(first, [2], [3], b""))
    assert list(first.history) == [1, 2, 3], "what was lent is the session's own"


@pytest.mark.parametrize("length", [100, 1_000_000])
def test_a_turn_does_not_walk_the_history(
    controller: SessionController, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """A turn reads nothing of the history, and hashes only the pages that it fills."""
    controller.adopt(_record(list(range(length))))
    hashed: list[int] = []
    hash_page = TokenChain._hash

    def counted(self: TokenChain, link: bytes, index: int) -> bytes:
        hashed.append(index)
        return hash_page(self, link, index)

    monkeypatch.setattr(TokenChain, "_hash", counted)
    monkeypatch.setattr(ChainedTokens, "__getitem__", None)
    _run_turn(controller, [1] * 8, [2] * 8)
    assert len(hashed) == 16 // PAGE_SIZE
    turn = _begin(controller, rewind_to=length - 50)
    controller.commit_turn(turn, controller.prepare_commit(turn, [1], [2], b""))
    assert len(hashed) <= 16 // PAGE_SIZE + 1


def test_a_history_takes_four_bytes_a_token_and_its_hashes(controller: SessionController) -> None:
    """A list of Python's integers took forty bytes a token, besides the chain's four."""
    record = _record(range(1_000_000))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    controller.adopt(record)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    hashes = 1_000_000 // PAGE_SIZE * DIGEST_BYTES
    assert taken < 1.13 * (4 * 1_000_000 + hashes) + 10_000, "a buffer that grows has some room"


def test_prepare_changes_nothing(controller: SessionController) -> None:
    controller.adopt(_record([1]))
    turn = _begin(controller)
    assert controller.prepare_commit(turn, [2], [3], b"") == controller.prepare_commit(turn, [2], [3], b"")
    assert controller.committed_len("s") == 1
    with pytest.raises(TurnInFlight):
        _begin(controller)


def test_a_turn_ends_exactly_once(controller: SessionController) -> None:
    controller.adopt(_record())
    turn = _begin(controller)
    record = controller.prepare_commit(turn, [1], [2], b"")
    controller.commit_turn(turn, record)
    with pytest.raises(TurnNotInFlight):
        controller.commit_turn(turn, record)
    with pytest.raises(TurnNotInFlight):
        controller.abort_turn(turn)
    with pytest.raises(TurnNotInFlight):
        controller.prepare_commit(turn, [1], [2], b"")
    assert _history(controller) == [1, 2]


def test_an_old_turn_cannot_end_a_new_one(controller: SessionController) -> None:
    controller.adopt(_record())
    old = _begin(controller)
    controller.abort_turn(old)
    _begin(controller)
    with pytest.raises(TurnNotInFlight):
        controller.abort_turn(old)


def test_abort_leaves_no_trace(controller: SessionController) -> None:
    controller.adopt(_record([1, 2]))
    turn = _begin(controller, idempotency_key="k")
    controller.prepare_commit(turn, [3], [4], b"x")
    controller.abort_turn(turn)
    retried = _begin(controller, idempotency_key="k")
    assert (list(retried.history), retried.turn_index) == ([1, 2], 0)


def test_one_turn_in_flight(controller: SessionController) -> None:
    controller.adopt(_record())
    turn = _begin(controller)
    with pytest.raises(TurnInFlight):
        _begin(controller)
    controller.abort_turn(turn)
    _begin(controller)


def test_rewind_takes_effect_at_commit(controller: SessionController) -> None:
    controller.adopt(_record([1, 2, 3, 4]))
    turn = _begin(controller, rewind_to=2)
    assert turn.history_len == 2
    assert controller.committed_len("s") == 4
    controller.commit_turn(turn, controller.prepare_commit(turn, [9], [10], b""))
    assert _history(controller) == [1, 2, 9, 10]
    _run_turn(controller, [11], [])
    assert _history(controller) == [1, 2, 9, 10, 11]


def test_aborted_rewind_leaves_history(controller: SessionController) -> None:
    controller.adopt(_record([1, 2, 3]))
    controller.abort_turn(_begin(controller, rewind_to=0))
    assert _history(controller) == [1, 2, 3]


def test_rewind_to_the_end_is_none(controller: SessionController) -> None:
    controller.adopt(_record([1, 2]))
    assert _begin(controller, rewind_to=2).history_len == 2


@pytest.mark.parametrize("rewind_to", [-1, 3, 10**9])
def test_rewind_outside_history_is_refused(controller: SessionController, rewind_to: int) -> None:
    controller.adopt(_record([1, 2]))
    with pytest.raises(InvalidRewind) as caught:
        _begin(controller, rewind_to=rewind_to)
    assert caught.value.param == "offset"
    _begin(controller)


def test_a_retried_turn_is_replayed(controller: SessionController) -> None:
    controller.adopt(_record())
    record = _run_turn(controller, [1], [2], idempotency_key="k")
    replay = controller.begin_turn("s", 1, idempotency_key="k")
    assert replay == Replay(0, record.result)
    assert _history(controller) == [1, 2]


def test_the_last_keys_are_kept(controller: SessionController) -> None:
    controller.adopt(_record())
    for index in range(KEPT_ANSWERS + 1):
        _run_turn(controller, [index], [], idempotency_key=f"k{index}")
    assert isinstance(controller.begin_turn("s", 1, idempotency_key="k1"), Replay)
    assert isinstance(controller.begin_turn("s", 1, idempotency_key="k0"), Turn)


def test_turns_without_a_clients_key_push_out_no_answer_of_those_with_one(
    controller: SessionController,
) -> None:
    """Eight turns of a client without keys used to push out such an answer, so that its retry ran again."""
    controller.adopt(_record())
    _run_turn(controller, [1], [2], idempotency_key="mine")
    made = [f"call-{number:032x}" for number in range(KEPT_ANSWERS + 1)]
    for key in made:
        _run_turn(controller, [1], [2], idempotency_key=key)
    assert isinstance(controller.begin_turn("s", 1, idempotency_key="mine"), Replay)
    assert isinstance(controller.begin_turn("s", 1, idempotency_key=made[-1]), Replay)
    assert isinstance(controller.begin_turn("s", 1, idempotency_key=made[0]), Turn)


def test_results_are_adopted(controller: SessionController) -> None:
    controller.adopt(_record([1], turns=1, results=(StoredResult("k", 0, b"stored"),)))
    assert controller.begin_turn("s", 1, idempotency_key="k") == Replay(0, b"stored")


def test_a_key_reused_for_another_request_is_refused(controller: SessionController) -> None:
    controller.adopt(_record())
    _run_turn(controller, [1], [2], idempotency_key="k", digest="a")
    assert isinstance(controller.begin_turn("s", 1, idempotency_key="k", digest="a"), Replay)
    assert isinstance(controller.begin_turn("s", 1, idempotency_key="k"), Replay)
    with pytest.raises(IdempotencyConflict):
        controller.begin_turn("s", 1, idempotency_key="k", digest="b")


def test_a_key_in_flight_is_not_replayed(controller: SessionController) -> None:
    controller.adopt(_record())
    _begin(controller, idempotency_key="k")
    with pytest.raises(TurnInFlight):
        _begin(controller, idempotency_key="k")


def test_unknown_session(controller: SessionController) -> None:
    with pytest.raises(SessionNotFound):
        controller.begin_turn("s", 1)
    with pytest.raises(SessionNotFound):
        controller.committed_len("s")
    assert controller.epoch("s") is None
    assert not controller.knows("s", 1)
    with pytest.raises(SessionNotFound):
        controller.close("s")
    assert not controller.is_closed("s")
    controller.drop("s")


@pytest.mark.parametrize("epoch", [1, 3])
def test_stale_epoch(controller: SessionController, epoch: int) -> None:
    controller.adopt(_record(epoch=2))
    with pytest.raises(StaleEpoch):
        controller.begin_turn("s", epoch)
    assert controller.epoch("s") == 2
    assert controller.knows("s", 2)
    assert not controller.knows("s", epoch)


def test_adopting_the_held_epoch_changes_nothing(controller: SessionController) -> None:
    controller.adopt(_record([1]))
    turn = _begin(controller)
    controller.adopt(_record([5, 6]))
    controller.commit_turn(turn, controller.prepare_commit(turn, [2], [], b""))
    assert _history(controller) == [1, 2]


def test_adopting_another_epoch(controller: SessionController) -> None:
    controller.adopt(_record([1], epoch=2))
    with pytest.raises(StaleEpoch):
        controller.adopt(_record(epoch=1))
    turn = controller.begin_turn("s", 2)
    with pytest.raises(TurnInFlight):
        controller.adopt(_record([1, 2], epoch=4))
    assert isinstance(turn, Turn)
    controller.abort_turn(turn)
    controller.adopt(_record([1, 2], epoch=4))
    assert controller.committed_len("s") == 2


def test_close_when_idle(controller: SessionController) -> None:
    controller.adopt(_record())
    assert controller.close("s") is None
    with pytest.raises(SessionClosing):
        _begin(controller)
    assert controller.is_closed("s")
    controller.drop("s")
    with pytest.raises(SessionNotFound):
        _begin(controller)


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("key", ["k", None])
def test_close_during_a_turn_waits_for_its_end(
    controller: SessionController, commits: bool, key: str | None
) -> None:
    controller.adopt(_record())
    turn = _begin(controller, idempotency_key=key)
    assert controller.close("s") == (key or "")
    assert not controller.is_closed("s")
    with pytest.raises(SessionClosing):
        _begin(controller)
    with pytest.raises(TurnInFlight):
        controller.drop("s")
    if commits:
        controller.commit_turn(turn, controller.prepare_commit(turn, [1], [2], b""))
    else:
        controller.abort_turn(turn)
    assert controller.is_closed("s")
    with pytest.raises(SessionClosing):
        _begin(controller)
    controller.drop("s")
    assert not controller.knows("s", 1)


def test_a_replay_is_answered_while_closing(controller: SessionController) -> None:
    controller.adopt(_record())
    _run_turn(controller, [1], [2], idempotency_key="k")
    controller.close("s")
    assert isinstance(controller.begin_turn("s", 1, idempotency_key="k"), Replay)


def test_expiry_counts_from_the_end_of_a_turn(controller: SessionController, clock: ManualClock) -> None:
    controller.adopt(_record())
    clock.advance(TIMEOUT_S)
    assert controller.expired() == []
    turn = _begin(controller)
    clock.advance(TIMEOUT_S * 100)
    assert controller.expired() == []
    controller.abort_turn(turn)
    clock.advance(TIMEOUT_S)
    assert controller.expired() == []
    clock.advance(0.1)
    assert controller.expired() == ["s"]
    controller.close("s")
    assert controller.expired() == ["s"], "it is only to be ended"


def test_a_session_may_bring_its_own_timeout(controller: SessionController, clock: ManualClock) -> None:
    controller.adopt(_record(timeout_s=5.0))
    clock.advance(6.0)
    assert controller.expired() == ["s"]


def test_capacity(controller: SessionController) -> None:
    controller.adopt(_record([1, 2], capacity_tokens=4))
    turn = _begin(controller)
    assert turn.room_tokens == 2
    with pytest.raises(CapacityExceeded):
        controller.prepare_commit(turn, [3], [4, 5], b"")
    controller.commit_turn(turn, controller.prepare_commit(turn, [3], [4], b""))
    with pytest.raises(CapacityExceeded):
        _begin(controller)
    assert _begin(controller, rewind_to=1).room_tokens == 3


def test_snapshot(controller: SessionController, clock: ManualClock) -> None:
    controller.adopt(_record([1, 2, 3], turns=2))
    clock.advance(7.0)
    (idle,) = controller.snapshot()
    assert (idle.session_id, idle.epoch, idle.tokens, idle.turns) == ("s", 1, 3, 2)
    assert (idle.idle_s, idle.in_turn, idle.closing) == (7.0, False, False)
    _begin(controller)
    controller.close("s")
    (busy,) = controller.snapshot()
    assert (busy.idle_s, busy.in_turn, busy.closing) == (0.0, True, True)


def counted(number: int) -> str:
    return f"{COUNTED_KEY}{number}"


def age_s(result: bytes) -> float:
    return float(result)


def test_a_try_that_is_counted_finds_the_key_of_the_last_turn_that_asked_the_same(
    controller: SessionController,
) -> None:
    controller.adopt(_record())
    assert controller.tried_key("s", 1, "a", age_s) is None
    _run_turn(controller, [1], [2], idempotency_key=counted(1), digest="a")
    assert controller.tried_key("s", 1, "a", age_s) == counted(1)
    assert controller.tried_key("s", 1, "b", age_s) is None
    _run_turn(controller, [1], [2], idempotency_key=counted(2), digest="b")
    assert controller.tried_key("s", 1, "a", age_s) is None
    assert controller.tried_key("s", 1, "b", age_s) == counted(2)


def test_it_finds_the_turn_in_flight(controller: SessionController) -> None:
    controller.adopt(_record())
    _run_turn(controller, [1], [2], idempotency_key=counted(1), digest="a")
    turn = _begin(controller, idempotency_key=counted(2), digest="a")
    assert controller.tried_key("s", 1, "a", age_s) == counted(2)
    assert controller.tried_key("s", 1, "b", age_s) is None
    controller.abort_turn(turn)


def test_it_finds_no_turn_of_a_client_that_names_keys_or_does_not_count(
    controller: SessionController,
) -> None:
    controller.adopt(_record())
    for key in ("mine", None):
        _run_turn(controller, [1], [2], idempotency_key=key, digest="a")
        assert controller.tried_key("s", 1, "a", age_s) is None


def test_it_does_not_take_an_equal_turn_before_for_the_one_that_left_no_trace(
    controller: SessionController,
) -> None:
    controller.adopt(_record())
    _run_turn(controller, [1], [2], idempotency_key=counted(1), digest="a")
    controller.abort_turn(_begin(controller, idempotency_key=counted(2), digest="a"))
    assert controller.tried_key("s", 1, "a", age_s) is None
    _run_turn(controller, [1], [2], idempotency_key=counted(3), digest="a")
    assert controller.tried_key("s", 1, "a", age_s) == counted(3)


def test_it_finds_no_turn_that_is_long_past(controller: SessionController, clock: ManualClock) -> None:
    controller.adopt(_record())
    _run_turn(controller, [1], [2], idempotency_key=counted(1), digest="a")
    clock.advance(TRIED_AGAIN_WITHIN_S)
    assert controller.tried_key("s", 1, "a", age_s) == counted(1)
    clock.advance(0.1)
    assert controller.tried_key("s", 1, "a", age_s) is None


def test_what_came_to_nothing_since_makes_it_no_younger(
    controller: SessionController, clock: ManualClock
) -> None:
    controller.adopt(_record())
    _run_turn(controller, [1], [2], idempotency_key=counted(1), digest="a")
    clock.advance(TRIED_AGAIN_WITHIN_S + 0.1)
    controller.abort_turn(_begin(controller, idempotency_key=counted(2), digest="b"))
    assert controller.tried_key("s", 1, "a", age_s) is None


def test_it_finds_the_turn_in_the_log_after_a_move_by_what_its_answer_says_of_its_age(
    controller: SessionController,
) -> None:
    stored = StoredResult(counted(1), 4, b"%d" % TRIED_AGAIN_WITHIN_S, "a")
    controller.adopt(_record(turns=5, results=(stored,)))
    assert controller.tried_key("s", 1, "a", age_s) == counted(1)
    with pytest.raises(StaleEpoch):
        controller.tried_key("s", 2, "a", age_s)
    long_past = replace(stored, result=b"%d" % (TRIED_AGAIN_WITHIN_S + 1))
    controller.adopt(_record(epoch=2, turns=5, results=(long_past,)))
    assert controller.tried_key("s", 2, "a", age_s) is None
