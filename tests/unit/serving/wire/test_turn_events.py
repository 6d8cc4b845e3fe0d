"""Events say the same however they are cut or joined."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import TokenLogprob
from serving.wire.turn_events import event_weight, merge_events, split_event
from serving.wire.turns import ErrorInfo, TextLogprob, TurnEvent, TurnFinish


def entries(count: int, first: int = 0) -> tuple[TextLogprob, ...]:
    return tuple(TextLogprob(TokenLogprob(first + n, -1.0), str(first + n)) for n in range(count))


@pytest.mark.parametrize("end", [{}, {"finish": TurnFinish("stop")}, {"error": ErrorInfo(500, "x", "y")}])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(0, 0), (4, 0), (5, 0), (0, 5), (9, 3), (8, 4), (3, 2), (23, 17)]
)
def test_pieces_are_small_and_tell_the_same(inputs: int, outputs: int, end: dict[str, Any]) -> None:
    whole = TurnEvent(
        text="abc",
        token_ids=(1, 2),
        prompt_tokens=7,
        completion_tokens=2,
        logprobs=entries(outputs),
        input_logprobs=entries(inputs, 100),
        **end,
    )
    *ahead, _ = pieces = list(split_event(whole, 4))
    assert all(event_weight(piece) <= 4 for piece in pieces)
    assert all(event_weight(piece) and not piece.text and not piece.token_ids for piece in ahead)
    assert all(piece.finish is None and piece.error is None for piece in ahead)
    assert merge_events(pieces) == whole
