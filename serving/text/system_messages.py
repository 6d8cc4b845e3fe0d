"""Puts messages of the roles `system` and `developer` where a chat template shows them, so that none is silently lost.

Many templates show a system message only if it is the first message, some show none, and few know developers. What a
template shows is found out by rendering. A message that it does not show becomes part of a user's message next to it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from engine.api import InvalidRequest

Messages = Sequence[Mapping[str, Any]]

SYSTEM, DEVELOPER, USER = "system", "developer", "user"
INSTRUCTING = frozenset({SYSTEM, DEVELOPER})
BETWEEN = "\n\n"
_MARK_BYTES = 12


class NoPlaceForMessage(InvalidRequest):
    """The model's chat template does not show the message, and there is no user's message next to it."""

    code = "chat_template_error"


def head_len(messages: Messages) -> int:
    """The number of instructing messages (system or developer) at the beginning of a conversation."""
    roles = (message["role"] not in INSTRUCTING for message in messages)
    return next((index for index, other in enumerate(roles) if other), len(messages))


def placed(messages: Messages, shown: Callable[[Messages], Collection[int]], *, developers: bool) -> Messages:
    """The messages in the form that the template is given. `shown` says which of the instructing ones it shows, by
    index. `developers`: whether it knows that role; if not, they become system messages.

    Raises NoPlaceForMessage, which names the message.
    """
    if all(message["role"] not in INSTRUCTING for message in messages):
        return messages
    if not developers:
        messages = [_as_system(message) for message in messages]
    kept = set(shown(messages))
    if not_kept := {index for index, each in enumerate(messages) if each["role"] == DEVELOPER} - kept:
        messages = [_as_system(each) if index in not_kept else each for index, each in enumerate(messages)]
        kept = set(shown(messages))
    kept |= {index for index, message in enumerate(messages) if message["role"] not in INSTRUCTING}
    return _folded(messages, kept)


def standing_in(messages: Messages) -> tuple[Messages, dict[int, str]]:
    """The messages with a mark in place of the text of each instructing one, and the marks by index. Nobody can guess
    the marks: they are looked for in a text that users' messages are part of."""
    secret = secrets.token_hex(_MARK_BYTES)
    marks = {
        index: f"KedgeInstruction{index}Here{secret}"
        for index, each in enumerate(messages)
        if each["role"] in INSTRUCTING
    }
    marked = [
        {**message, "content": marks[index]} if index in marks else message
        for index, message in enumerate(messages)
    ]
    return marked, marks


def _folded(messages: Messages, kept: Collection[int]) -> Messages:
    """Each message that is not kept becomes part of another: of the system message at the beginning of the
    conversation, else of the user's message after it, else of the one before it."""
    result: list[dict[str, Any]] = []
    waiting: list[int] = []
    for index, message in enumerate(messages):
        if index not in kept:
            if not waiting and len(result) == 1 and result[0]["role"] in INSTRUCTING:
                result[0]["content"] += BETWEEN + message["content"]
            else:
                waiting.append(index)
            continue
        message = dict(message)
        if waiting:
            texts = [messages[each]["content"] for each in waiting]
            if message["role"] == USER:
                message["content"] = BETWEEN.join([*texts, message["content"]])
            else:
                _append(result, texts, waiting[0])
            waiting = []
        result.append(message)
    if waiting:
        _append(result, [messages[each]["content"] for each in waiting], waiting[0])
    return result


def _append(result: list[dict[str, Any]], texts: Sequence[str], first: int) -> None:
    if not result or result[-1]["role"] != USER:
        raise NoPlaceForMessage(
            f"messages[{first}]: the model's chat template does not show a system message here; put it at the "
            "beginning, or beside a user's message, of which it becomes a part.",
            f"messages[{first}]",
        )
    result[-1]["content"] = BETWEEN.join([result[-1]["content"], *texts])


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "role": SYSTEM} if message["role"] == DEVELOPER else message
