"""How chat and text completions write a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from msgspec import UNSET, UnsetType

from serving.front.api.errors import openai_error
from serving.front.api.openai.replies import Usage, UsageCounter
from serving.front.api.openai.requests import OpenAiBody
from serving.front.api.reply_json import Reply, TextTemplate, reply_json
from serving.front.api.sse import DONE, KEEP_ALIVE_COMMENT, error_then_done, server_event
from serving.wire.turns import ErrorInfo, TurnEvent


class ChunkEncoder(ABC):
    """A StreamEncoder of one request. `form` is what a chunk is: it has `choices` and `usage`."""

    keep_alive = KEEP_ALIVE_COMMENT

    def __init__(self, asked: OpenAiBody, reply_id: str, model_id: str, form: Callable[..., Reply]) -> None:
        self._chunk_of = partial(form, id=reply_id, created=int(time.time()), model=model_id)
        self._usage = UsageCounter(asked.n or 1)
        self._usage_at_the_end = asked.wants_usage_chunk
        self._usage_everywhere = asked.wants_usage_everywhere
        self._started: set[int] = set()
        """Choices of which something was told."""
        self._templates: dict[int, TextTemplate] = {}

    @abstractmethod
    async def chunk(self, index: int, event: TurnEvent) -> bytes:
        """The index-th choice's next events."""

    @abstractmethod
    def _choice_of(self, index: int, text: str) -> Reply:
        """One that has nothing to say but this."""

    def _text_chunk(self, index: int, text: str) -> bytes:
        template = self._templates.get(index)
        if template is None:
            chunk = self._chunk_of(choices=[self._choice_of(index, TextTemplate.TEXT)])
            template = self._templates[index] = TextTemplate(chunk)
        return server_event(template.with_text(text))

    def _usage_so_far(self) -> Usage | UnsetType:
        return self._usage.usage() if self._usage_everywhere else UNSET

    def closing(self) -> bytes:
        if not self._usage_at_the_end:
            return DONE
        return server_event(reply_json(self._chunk_of(choices=[], usage=self._usage.usage()))) + DONE

    def error(self, info: ErrorInfo) -> bytes:
        return error_then_done(openai_error(info))
