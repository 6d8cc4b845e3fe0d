"""Bodies with one message's text in thousands of pieces. Each piece is copied a few times, not once for each later one:
a body of 11 MiB held a front end's event loop for eight seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from serving.front.api.messages.history import for_template
from serving.front.api.messages.schema import CountTokensBody
from serving.front.api.responses.history import template_messages
from serving.front.api.responses.items import Json

PIECE = "x" * 700
MOST_CPU_S = 1.0
"""What takes this long here copies gigabytes."""


def in_time(make: Callable[[], tuple[Json, ...]]) -> tuple[Json, ...]:
    started_s = time.process_time()
    made = make()
    assert time.process_time() - started_s < MOST_CPU_S
    return made


def test_blocks_of_successive_messages_are_joined_at_once() -> None:
    blocks = [{"type": "text", "text": PIECE}] * 1000
    messages = [{"role": "user", "content": blocks}] * 16
    body = CountTokensBody.model_validate({"messages": messages})
    (joined,) = in_time(lambda: for_template(body.system, body.messages))
    assert joined == {"role": "user", "content": "\n".join([PIECE] * 16_000)}


def test_texts_after_a_call_are_joined_at_once() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": PIECE}]}
    (answer,) = in_time(lambda: template_messages(None, [call, *[text] * 16_000]))
    assert answer["content"] == PIECE * 16_000
    assert len(answer["tool_calls"]) == 1
