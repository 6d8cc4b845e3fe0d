"""A long prompt is encoded outside the event loop, for a limited time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import EngineOverloaded
from serving.grammars.constraints import ConstraintCompiler
from serving.replica.turn_request import LONG_PROMPT, RequestBuilder
from serving.text.chat_template import ChatTemplate
from serving.wire.turns import ChatPrompt, Prompt, TextPrompt, TokenPrompt, TurnCall
from tests.unit.serving.local_service import small_text
from tests.unit.serving.replica_rig import VOCAB_SIZE, Rig, call, running_rig

NO_GRAMMARS = ConstraintCompiler(None, VOCAB_SIZE)
MESSAGE = {"role": "user", "content": "hi"}
LONG: list[Prompt] = [
    TextPrompt("a" * LONG_PROMPT),
    TokenPrompt((5,) * (LONG_PROMPT + 1)),
    ChatPrompt((MESSAGE | {"content": "a" * LONG_PROMPT},)),
    ChatPrompt((MESSAGE,) * 2000),
    ChatPrompt((MESSAGE,), {"deep": {"in": ["a" * LONG_PROMPT]}}),
    ChatPrompt((MESSAGE,), {}, ({"type": "function", "function": {"description": "a" * LONG_PROMPT}},)),
]


class Slow:
    """A text processor that is busy until `go_on` is set. `threads` are the threads on which it worked."""

    tokenizer = None
    tokenizer_hash = ""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.go_on = threading.Event()

    def encode_prompt(self, *_: Any, **__: Any) -> list[int]:
        self.threads.append(threading.current_thread())
        self.go_on.wait(10.0)
        return [5]


@pytest.fixture
def slow() -> Iterator[Slow]:
    slow = Slow()
    yield slow
    slow.go_on.set()


@pytest.fixture
async def rig(tmp_path: Path) -> Any:
    async with running_rig(tmp_path) as rig:
        yield rig


@pytest.mark.parametrize("prompt", LONG)
async def test_a_long_prompt_leaves_the_event_loop_free(rig: Rig, slow: Slow, prompt: Prompt) -> None:
    """A template's arguments used not to count as prompt: 31 MiB of them paused every stream for 5.5 s."""
    builder = RequestBuilder(rig.engine, slow, NO_GRAMMARS)  # type: ignore[arg-type]
    asked = call([5])
    building = asyncio.create_task(builder.place(_with(asked, prompt), None))
    while not slow.threads:
        await asyncio.sleep(0)
    assert slow.threads[0] is not threading.main_thread()
    slow.go_on.set()
    assert (await building).new_tokens == [5]


async def test_a_prompt_that_takes_too_long_is_given_up(rig: Rig, slow: Slow) -> None:
    builder = RequestBuilder(rig.engine, slow, NO_GRAMMARS, long_prompt_timeout_s=0.05)  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(EngineOverloaded, match=r"within 0\.05 s"):
            await builder.place(_with(call([5]), LONG[0]), None)
    assert len(slow.threads) == 2, "who has no thread waits no longer than who has one"
    slow.go_on.set()
    assert (await builder.place(call([5]), None)).new_tokens == [5]


async def test_messages_that_cannot_fit_are_refused_before_they_are_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(*_: Any) -> str:
        raise AssertionError("rendered")

    async with running_rig(tmp_path, text=small_text()) as rig:
        monkeypatch.setattr(ChatTemplate, "render", render)
        prompt = ChatPrompt((MESSAGE | {"content": "a" * 1_000_000},))
        (event,) = await rig.run(_with(call([5]), prompt))
        assert event.error is not None
        assert (event.error.code, event.error.param) == ("context_length_exceeded", "messages")


def _with(asked: TurnCall, prompt: Prompt) -> TurnCall:
    return replace(asked, prompt=prompt)
