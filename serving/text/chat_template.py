"""Chat messages to text with a model's own template: whole conversations, or only what a turn adds to one.

A continuation must not render the history again. It is found by rendering a stand-in conversation (one question, one
answer) followed by the new messages, and keeping what comes after the answer's words: the text that closes the answer,
the new messages, and the opening of the next answer.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jinja2

from engine.api import InvalidRequest
from serving.text.message_form import MessageForm
from serving.text.system_messages import (
    DEVELOPER,
    INSTRUCTING,
    SYSTEM,
    USER,
    Messages,
    head_len,
    placed,
    standing_in,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "KedgeStandInAnswer"
_STAND_IN: Messages = (
    {"role": "user", "content": "KedgeStandInQuestion"},
    {"role": "assistant", "content": _ANSWER},
)
_PROBE: Messages = ({"role": "user", "content": "KedgeProbe"},)
_EARLIER: Messages = ({"role": "user", "content": "Earlier"}, {"role": "assistant", "content": "Words"})
_CALL_ID = "KedgeCall"
_CALLED: Messages = (
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": _CALL_ID, "type": "function", "function": {"name": "stand_in", "arguments": {"a": 1}}}
        ],
    },
    {"role": "tool", "content": "Result", "tool_call_id": _CALL_ID},
)
_THOUGHT: Messages = (
    {"role": "user", "content": "Earlier"},
    {"role": "assistant", "content": "<think>\nHm\n</think>\n\nWords", "reasoning_content": "Hm"},
)
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_OWN_TEMPLATE = "chat_template"
"""The option of transformers, and the field of a request, that gives another template."""
_HEADS_AT_ONCE = 64
"""How many heads (system messages with their tools) are remembered, with whether the text after them depends on
them."""


class TemplateRefused(InvalidRequest):
    """The model's chat template does not accept these messages."""

    code = "chat_template_error"


class TemplateNotIncremental(InvalidRequest):
    """What the template writes for new messages depends on the messages before them."""

    code = "chat_template_not_incremental"


@dataclass(frozen=True, slots=True)
class AnsweredText:
    """What the template writes after messages that were answered. The answer followed `opening`. `text` begins with
    `opening`, or with what the template writes in its place before an answer that is given."""

    opening: str
    text: str


class ChatTemplate:
    """The template of one tokenizer. Whether it can continue a conversation is found out once, here."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        own = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = frozenset(own) | {"messages", "bos_token", "eos_token"}
        self._form = MessageForm()
        self._form = MessageForm.of(lambda messages: self._render(messages, {}))
        self._developers = DEVELOPER in self.text_with_tools
        """Whether the template names this role. A template that writes any role it is given does not know the role."""
        self._first_system_shown = self._shows_first_system()
        self._not_incremental = self._probe()
        self._opening = lru_cache(_HEADS_AT_ONCE)(self._probe_opening)
        self._stands_alone = lru_cache(_HEADS_AT_ONCE)(self._probe_head)

    @property
    def text_with_tools(self) -> str:
        """The template itself, in its form for tools if it has two. Empty if the tokenizer cannot choose one."""
        try:
            return str(self._tokenizer.get_chat_template(tools=[{}]))
        except ValueError:
            return ""

    def render(
        self,
        messages: Messages,
        kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        answers: bool = True,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> str:
        """A whole conversation. With `answers` it ends with the opening of the model's answer. `options` are those of
        transformers' `apply_chat_template`."""

        def shown(messages: Messages) -> Collection[int]:
            marked, marks = standing_in(messages)
            try:
                text = self._render(marked, kwargs, tools, answers=answers, options=options)
            except TemplateRefused:
                # The template may have refused a later message.
                return {0} & marks.keys() if self._first_system_shown else ()
            return [index for index, mark in marks.items() if mark in text]

        messages = placed(messages, shown, developers=self._developers)
        return self._render(messages, kwargs, tools, answers=answers, options=options)

    def render_continuation(self, messages: Messages, kwargs: Mapping[str, Any]) -> str:
        """What follows the words of a finished answer: its closing text, then `messages`, then the next opening."""
        if self._not_incremental:
            raise TemplateNotIncremental(self._not_incremental, "messages")

        def shown(messages: Messages) -> Collection[int]:
            marked, marks = standing_in(messages)
            try:
                text = _after_answer(self._render((*_STAND_IN, *marked), kwargs))
            except TemplateRefused:
                return ()
            return [index for index, mark in marks.items() if mark in text]

        messages = placed(messages, shown, developers=self._developers)
        return _after_answer(self._render((*_STAND_IN, *messages), kwargs))

    def opening(self, kwargs: Mapping[str, Any]) -> str:
        """The text that opens an answer to a question; empty if that cannot be determined."""
        return self._opening(_text_of(kwargs))

    def _probe_opening(self, kwargs: str) -> str:
        arguments = json.loads(kwargs)
        try:
            closed, opened = (self._render(_PROBE, arguments, answers=answers) for answers in (False, True))
        except InvalidRequest:
            return ""
        return opened.removeprefix(closed) if opened.startswith(closed) else ""

    def render_head(
        self, messages: Messages, kwargs: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, str]:
        """Two conversations that begin with these system messages and tools, and have nothing else in common."""
        first, second = ([*messages, {"role": USER, "content": text}] for text in ("Kedge", "Stand-in"))
        return self.render(first, kwargs, tools), self.render(second, kwargs, tools)

    def render_answered(
        self,
        messages: Messages,
        num_asked: int,
        kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> AnsweredText | None:
        """What follows the first `num_asked` messages of a conversation, which were answered, up to the opening of the
        next answer. The cost depends on the messages after them, however many they are.

        None if this is impossible without rendering all messages: the template writes the text differently depending on
        what comes before, or puts later messages in front.
        """
        asked, rest = messages[num_asked - 1], messages[num_asked:]
        if asked["role"] in INSTRUCTING or any(each["role"] in INSTRUCTING for each in rest):
            return None
        head = messages[: head_len(messages)]
        called = any(each["role"] == "tool" or "tool_calls" in each for each in messages)
        if not self._stands_alone(_text_of(head), _text_of(kwargs), _text_of(tools), called=called):
            return None
        # A template that writes thoughts up to a later question than `asked` also rewrites this one, so it is detected.
        before = [*_THOUGHT, asked] if asked["role"] == USER else [*_PROBE, asked]
        try:
            closed = self._render(before, kwargs, answers=False)
            opened = self._render(before, kwargs)
            whole = self._render([*before, *rest], kwargs)
        except InvalidRequest:
            return None
        if not (opened.startswith(closed) and whole.startswith(closed)):
            return None
        return AnsweredText(opened[len(closed) :], whole[len(closed) :])

    def _probe_head(self, head: str, kwargs: str, tools: str, *, called: bool) -> bool:
        """Whether the template writes the same text after a question with this head (in JSON) and without it, whatever
        was said before. `called`: also with calls and their results before it."""
        arguments, question = json.loads(kwargs), _STAND_IN[:1]
        answers = [(*_STAND_IN[1:], *_PROBE), *([_CALLED] if called else [])]
        earlier = [(), _EARLIER, *([(*_EARLIER[:1], *_CALLED, *_EARLIER[1:])] if called else [])]
        try:
            given, given_tools = json.loads(head), json.loads(tools)
            return all(
                self._behind([*given, *before, *question], answer, arguments, given_tools)
                == self._behind(question, answer, arguments)
                for answer in answers
                for before in earlier
            )
        except (InvalidRequest, ValueError):
            return False

    def _behind(
        self,
        messages: Messages,
        behind: Messages,
        kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """What the template adds for the messages `behind`. Raises ValueError if that changes the text before them."""

        def shown(messages: Messages) -> Collection[int]:
            return range(len(messages))

        messages = placed(messages, shown, developers=self._developers)
        closed = self._render(messages, kwargs, tools, answers=False)
        whole = self._render([*messages, *behind], kwargs, tools)
        if not whole.startswith(closed):
            raise ValueError("not appended")
        return whole[len(closed) :]

    def _render(
        self,
        messages: Messages,
        kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        answers: bool = True,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> str:
        """`answers`: ends with the opening of the model's answer."""
        if reserved := self._reserved.intersection(kwargs):
            name = min(reserved)
            raise InvalidRequest(f"{name!r} cannot be set for the chat template.", "chat_template_kwargs")
        try:
            text = self._tokenizer.apply_chat_template(
                list(self._form.shaped(messages)),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=answers,
                **options,
                **kwargs,
            )
        except Exception as error:
            # A template is a program: it may raise anything.
            raise _refused(error, of_request=_OWN_TEMPLATE in options) from error
        return str(text)

    def _shows_first_system(self) -> bool:
        marked, marks = standing_in(({"role": SYSTEM, "content": ""}, *_PROBE))
        try:
            return marks[0] in self._render(marked, {})
        except InvalidRequest:
            return False

    def _probe(self) -> str | None:
        """Why the template cannot continue a conversation, or None."""
        try:
            once = _after_answer(self._render((*_STAND_IN, *_PROBE), {}))
            twice = _after_answer(self._render((*_EARLIER, *_STAND_IN, *_PROBE), {}))
        except InvalidRequest as error:
            return error.message
        if once != twice:
            return (
                "The model's chat template renders a message differently depending on the ones before it, so a "
                "session cannot be continued by messages; append text or token ids instead."
            )
        return None


def _refused(error: Exception, *, of_request: bool) -> TemplateRefused:
    """`of_request`: the template comes from the request."""
    said = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
    # Halves of characters do not travel.
    said = said.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if of_request:
        return TemplateRefused(f"{_OWN_TEMPLATE}: it failed: {said}", _OWN_TEMPLATE)
    return TemplateRefused(f"The model's chat template refused the messages: {said}", "messages")


def _text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _after_answer(text: str) -> str:
    _, answer, rest = text.partition(_ANSWER)
    if not answer:
        raise TemplateNotIncremental(
            "The model's chat template does not show an earlier answer as it was given, so a session cannot be "
            "continued by messages; append text or token ids instead.",
            "messages",
        )
    return rest
