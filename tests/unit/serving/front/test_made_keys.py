"""The keys that front ends make for turns whose clients name none."""

from __future__ import annotations

from controllers.records import COUNTED_KEY
from controllers.session_log.kept_answers import CALL_KEY, is_clients
from engine.api import SamplingParams
from serving.front.turn_dispatch import _with_key
from serving.wire.turns import SessionTurn, TokenPrompt, TurnCall


def test_the_keys_that_front_ends_make_are_none_of_a_client() -> None:
    for retries, prefix in ((None, CALL_KEY), (0, COUNTED_KEY)):
        call = TurnCall(
            "q", TokenPrompt((1,)), SamplingParams(), 1, session=SessionTurn("s", retries=retries)
        )
        session = _with_key(call).session
        assert session is not None
        assert session.idempotency_key is not None
        assert session.idempotency_key.startswith(prefix)
        assert not is_clients(session.idempotency_key)
