"""Thoughts, text and calls of an answer come in the order in which the model wrote them, however its text is cut."""

from __future__ import annotations

from typing import Any

import pytest

from serving.front.api.answers.reader import AnswerPart, AnswerReader
from serving.front.api.answers.tools import NO_TOOLS
from serving.front.api.messages.replies import TextReply, ThinkingReply, blocks_of
from serving.front.api.messages.stream import BlockEvents
from serving.front.api.responses.output import OutputItems
from serving.front.api.responses.tools import offered_tools
from serving.wire.turns import TurnEvent, TurnFinish
from tests.unit.serving.local_service import MODEL

ANSWER = (
    "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Rex."
)
CUTS = [[ANSWER], list(ANSWER), [ANSWER[:40], ANSWER[40:90], ANSWER[90:]]]


def parts_of(cut: list[str]) -> list[AnswerPart]:
    reader = AnswerReader("r", NO_TOOLS, "gpt_oss")
    finish = TurnFinish("stop")
    last = len(cut) - 1
    return [
        reader.read(TurnEvent(text=text, finish=finish if at == last else None))
        for at, text in enumerate(cut)
    ]


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "by character", "in three"])
def test_items_of_a_response(cut: list[str]) -> None:
    """Thoughts of an event came before its text, so a response that was read again had other items than its stream."""
    items = OutputItems("resp_" + "0" * 40, offered_tools(None, None, None, MODEL), encrypts_reasoning=False)
    for part in parts_of(cut):
        list(items.add(part))
    list(items.end_answer("completed"))
    said: list[Any] = [(item["type"], item["content"][0]["text"]) for item in items.items]
    assert said == [("message", "I will look."), ("reasoning", "Hm."), ("message", "\nRex.")]


@pytest.mark.parametrize("cut", CUTS, ids=["whole", "by character", "in three"])
def test_blocks_of_a_message(cut: list[str]) -> None:
    blocks = BlockEvents()
    events = [event for part in parts_of(cut) for event in blocks.add(part)]
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert begun == [TextReply(text=""), ThinkingReply(thinking=""), TextReply(text="")]
    if len(cut) == 1:
        (whole,) = parts_of(cut)
        assert blocks_of(whole) == [
            TextReply(text="I will look."),
            ThinkingReply(thinking="Hm."),
            TextReply(text="\nRex."),
        ]
        assert (whole.content, whole.reasoning) == ("I will look.\nRex.", "Hm.")
