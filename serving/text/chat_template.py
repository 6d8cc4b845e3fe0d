"""Chat messages to text with a model's own template: whole conversations, or only what a turn adds to one.

A continuation must not render the history again. It is found by rendering a stand-in conversation (one question, one
answer) followed by the new messages, and keeping what comes after the answer's words: the text that closes the
answer, the new messages, and the opening of the next answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from engine.api import InvalidRequest
from serving.text.system_messages import DEVELOPER, SYSTEM, Messages, placed, standing_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "KedgeStandInAnswer"
_STAND_IN: Messages = (
    {"role": "user", "content": "KedgeStandInQuestion"},
    {"role": "assistant", "content": _ANSWER},
)
_PROBE: Messages = ({"role": "user", "content": "KedgeProbe"},)


class TemplateRefused(InvalidRequest):
    """The model's chat template does not take these messages."""

    code = "chat_template_error"


class TemplateNotIncremental(InvalidRequest):
    """What the template writes for new messages depends on the messages before them."""

    code = "chat_template_not_incremental"


class ChatTemplate:
    """The template of one tokenizer. Whether it can continue a conversation is found out once, here."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        own = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = frozenset(own) | {"messages", "bos_token", "eos_token"}
        self._developers = DEVELOPER in self.text_with_tools
        """Whether the template names this role: one that writes whatever role it is given does not know it."""
        self._first_system_shown = self._shows_first_system()
        self._not_incremental = self._probe()

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
    ) -> str:
        """A whole conversation, up to the point where the model begins to answer."""

        def shown(messages: Messages) -> Collection[int]:
            marked, marks = standing_in(messages)
            try:
                text = self._render(marked, kwargs, tools)
            except TemplateRefused:
                # It may be a later one that it refuses.
                return {0} & marks.keys() if self._first_system_shown else ()
            return [index for index, mark in marks.items() if mark in text]

        return self._render(placed(messages, shown, developers=self._developers), kwargs, tools)

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

    def _render(
        self, messages: Messages, kwargs: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        if reserved := self._reserved.intersection(kwargs):
            name = min(reserved)
            raise InvalidRequest(f"{name!r} cannot be set for the chat template.", "chat_template_kwargs")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            message = f"The model's chat template refused the messages: {error}"
            raise TemplateRefused(message, "messages") from error
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
            earlier = ({"role": "user", "content": "Earlier"}, {"role": "assistant", "content": "Words"})
            twice = _after_answer(self._render((*earlier, *_STAND_IN, *_PROBE), {}))
        except InvalidRequest as error:
            return error.message
        if once != twice:
            return (
                "The model's chat template renders a message differently depending on the ones before it, so a "
                "session cannot be continued by messages; append text or token ids instead."
            )
        return None


def _after_answer(text: str) -> str:
    _, answer, rest = text.partition(_ANSWER)
    if not answer:
        raise TemplateNotIncremental(
            "The model's chat template does not show an earlier answer as it was given, so a session cannot be "
            "continued by messages; append text or token ids instead.",
            "messages",
        )
    return rest
