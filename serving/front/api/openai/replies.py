"""What the replies of chat and text completions have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET, UnsetType

from serving.front.api.errors import openai_error
from serving.front.api.openai.requests import OpenAiBody
from serving.front.api.reply_json import Reply, TextTemplate, or_unset, reply_json
from serving.front.api.sse import DONE, KEEP_ALIVE_COMMENT, error_then_done, server_event
from serving.wire.turns import ErrorInfo, TurnEvent, TurnFinish


class CachedTokens(Reply, kw_only=True):
    cached_tokens: int


class PredictedTokens(Reply, kw_only=True):
    """OpenAI's names for drafts: those that the model agreed with, and those that it did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Reply, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictedTokens | UnsetType = UNSET


class StopDetails(Reply, kw_only=True):
    """The end of a choice: vLLM's `stop_reason` says which of the request's stop strings or token ids it was."""

    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class UsageCounter:
    """Counts the tokens of a request with several choices. A prompt counts once, however often it is continued."""

    def __init__(self, choices_per_prompt: int) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._latest: dict[int, TurnEvent] = {}

    def note(self, index: int, totals: TurnEvent) -> None:
        self._latest[index] = totals

    def usage(self) -> Usage:
        first = [latest for i, latest in self._latest.items() if i % self._choices_per_prompt == 0]
        prompt_tokens = sum(totals.prompt_tokens for totals in first)
        completion_tokens = sum(totals.completion_tokens for totals in self._latest.values())
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=CachedTokens(cached_tokens=sum(totals.cached_tokens for totals in first)),
            completion_tokens_details=_predicted(self._latest.values()),
        )


def _predicted(totals: Iterable[TurnEvent]) -> PredictedTokens | UnsetType:
    """UNSET if nothing was proposed."""
    drafts = [(each.draft_tokens, each.accepted_draft_tokens) for each in totals]
    proposed, accepted = (sum(counts) for counts in zip(*drafts, strict=True)) if drafts else (0, 0)
    if proposed == 0:
        return UNSET
    return PredictedTokens(
        accepted_prediction_tokens=accepted, rejected_prediction_tokens=proposed - accepted
    )


def usage_of(results: Sequence[TurnEvent]) -> Usage:
    """The usage of whole turns, the choices of one prompt."""
    counter = UsageCounter(len(results))
    for index, result in enumerate(results):
        counter.note(index, result)
    return counter.usage()


def stop_fields(body: OpenAiBody, finish: TurnFinish | None, output: TurnEvent) -> dict[str, Any]:
    """The fields of StopDetails. The model's own end token is no `stop_reason`: only the request's own are."""
    matched = None if finish is None else finish.matched
    asked_for = isinstance(matched, str) or matched in (body.stop_token_ids or ())
    return {
        "finish_reason": None if finish is None else finish.reason,
        "stop_reason": or_unset(matched if asked_for else None),
        "token_ids": output.token_ids if body.return_token_ids else UNSET,
    }


class ChunkEncoder(ABC):
    """A StreamEncoder of one request. `form` makes a chunk, which has `choices` and `usage`."""

    keep_alive = KEEP_ALIVE_COMMENT

    def __init__(self, asked: OpenAiBody, reply_id: str, model_id: str, form: Callable[..., Reply]) -> None:
        self._chunk_of = partial(form, id=reply_id, created=int(time.time()), model=model_id)
        self._usage = UsageCounter(asked.n or 1)
        self._usage_at_the_end = asked.wants_usage_chunk
        self._usage_everywhere = asked.wants_usage_everywhere
        self._started: set[int] = set()
        """Choices of which something was sent."""
        self._templates: dict[int, TextTemplate] = {}

    def accepted(self) -> bytes:
        return b""

    @abstractmethod
    async def chunk(self, index: int, event: TurnEvent) -> bytes:
        """What is sent for the next event of the index-th choice."""

    @abstractmethod
    def _choice_of(self, index: int, text: str) -> Reply:
        """A choice that has nothing but this text."""

    def _text_chunk(self, index: int, text: str) -> bytes:
        """Nothing for no text: the marks and the name of a call, and some tokens, have none to tell yet."""
        if not text:
            return b""
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
