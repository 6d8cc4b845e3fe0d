"""Where a turn's prompt continues the history: at its end, or where a whole conversation first differs from it.

A prompt that is a whole conversation is compared with the history token by token. So the answer is the one a fresh
request would get, even if the template renders earlier messages differently once the conversation goes on. Checkpoints
only save work: messages that are known to be in the history are not rendered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from controllers.records import Checkpoint
from controllers.session_keys import named
from controllers.turns import Turn
from engine.api import InvalidRequest
from serving.text.system_messages import USER, head_len
from serving.text.text import ContinuedPrompt, TextProcessor, common_len
from serving.wire.turns import ChatPrompt, Prompt, TurnCall

ASSISTANT = "assistant"
_MOST_OPENING = 64
"""The most tokens that can count as the opening of an answer. If there are more, they count as part of the input."""


class HistoryDiffers(InvalidRequest):
    """The messages are a whole history, but not this session's."""

    code = "history_differs"


class AmbiguousHistory(InvalidRequest):
    """The messages are those that the session began with. They may be new messages, or the same ones to be answered
    again."""

    code = "ambiguous_history"


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A turn keeps the first `kept_len` tokens of its history and adds `new_tokens`.

    `checkpoint` is where its answer begins, if the whole conversation up to there is known. `whole`: the client sends
    whole histories. The prompt's messages after the first `num_told` are new. They follow the first `num_kept` messages
    of the conversation (None: all of them). The last `opening_len` tokens open the answer."""

    kept_len: int
    new_tokens: list[int]
    checkpoint: Checkpoint | None = None
    whole: bool = False
    num_kept: int | None = None
    num_told: int = 0
    opening_len: int = 0


class PromptPlacer:
    """Places prompts. Safe to use from any thread. The turn must be in flight: its history and checkpoints are read."""

    def __init__(self, text: TextProcessor) -> None:
        self._text = text

    def place(self, call: TurnCall, turn: Turn | None) -> PlacedPrompt:
        """Places the call's prompt in the history of `turn` (None: there is no history).

        Raises InvalidRequest, ContextLengthExceeded, HistoryDiffers and AmbiguousHistory, which name the field.
        """
        prompt = call.prompt
        if turn is None:
            return PlacedPrompt(0, _kept(self._text.encode_prompt(prompt), call.keep_last))
        if not isinstance(prompt, ChatPrompt) or not prompt.said:
            return self._appended(prompt, turn)
        if turn.history_len == 0:
            new_tokens = self._text.encode_prompt(prompt)
            opening_len = self._text.opening_len(prompt, new_tokens[-_MOST_OPENING:])
            place = _checkpoint(prompt, len(new_tokens))
            whole = _sends_whole(
                call, turn
            )  # that the first messages contain an answer says nothing of the next ones
            return PlacedPrompt(0, new_tokens, place, whole, num_kept=0, opening_len=opening_len)
        if _is_whole(call, prompt, turn):
            return self._gone_on_with(prompt, turn)
        return self._looked_at(prompt, turn)

    def unknown_part(self, call: TurnCall, turn: Turn | None) -> ChatPrompt | None:
        """The prompt that `place_behind` renders: it leaves out messages that are known to be in the history. None if
        none are known."""
        prompt = call.prompt
        if turn is None or not isinstance(prompt, ChatPrompt) or not _is_whole(call, prompt, turn):
            return None
        start = _rendered_from(prompt, _known(prompt, turn))
        if start is None:
            return None
        head, behind = prompt.messages[: head_len(prompt.messages)], prompt.messages[start.num_messages - 1 :]
        return replace(prompt, messages=(*head, *behind))

    def place_behind(self, call: TurnCall, turn: Turn) -> PlacedPrompt | None:
        """The result of `place` for a prompt with an `unknown_part`, for the cost of rendering only that part. None if
        the template needs the whole prompt. Raises what `place` raises."""
        prompt = call.prompt
        assert isinstance(prompt, ChatPrompt)
        known = _known(prompt, turn)
        continued = self._behind(prompt, turn, known)
        return None if continued is None else self._placed(prompt, turn, known, continued)

    def _appended(self, prompt: Prompt, turn: Turn, num_told: int = 0) -> PlacedPrompt:
        length = turn.history_len
        last_token = turn.history[length - 1] if length else None
        new_tokens = self._text.encode_prompt(prompt, history_len=length, last_token=last_token)
        return PlacedPrompt(length, new_tokens, num_told=num_told)

    def _gone_on_with(self, prompt: ChatPrompt, turn: Turn) -> PlacedPrompt:
        known = _known(prompt, turn)
        continued = self._behind(prompt, turn, known) or self._text.encode_conversation(prompt, turn.history)
        if not known:
            self._check_begins_alike(prompt, turn, continued.kept_len)
        return self._placed(prompt, turn, known, continued)

    def _behind(self, prompt: ChatPrompt, turn: Turn, known: Sequence[Checkpoint]) -> ContinuedPrompt | None:
        start = _rendered_from(prompt, known)
        if start is None:
            return None
        return self._text.encode_answered(
            prompt, turn.history, num_asked=start.num_messages, asked_len=start.length
        )

    def _placed(
        self, prompt: ChatPrompt, turn: Turn, known: Sequence[Checkpoint], continued: ContinuedPrompt
    ) -> PlacedPrompt:
        end = continued.kept_len + len(continued.new_tokens)
        num_kept = next(
            (
                each.num_messages
                for each in known
                if each.length - self._opening_len(prompt, turn.history, each.length) <= continued.kept_len
            ),
            0,
        )
        kept = turn.history[max(0, continued.kept_len - _MOST_OPENING) : continued.kept_len]
        opening_len = self._text.opening_len(prompt, [*kept, *continued.new_tokens[-_MOST_OPENING:]])
        return PlacedPrompt(
            continued.kept_len,
            continued.new_tokens,
            _checkpoint(prompt, end),
            whole=True,
            num_kept=num_kept,
            num_told=num_kept,
            opening_len=min(opening_len, len(continued.new_tokens)),
        )

    def _opening_len(self, prompt: ChatPrompt, history: Sequence[int], asked_len: int) -> int:
        return self._text.opening_len(prompt, history[max(0, asked_len - _MOST_OPENING) : asked_len])

    def _check_begins_alike(self, prompt: ChatPrompt, turn: Turn, kept_len: int) -> None:
        """Raises HistoryDiffers unless the prompt's messages before its first answer are those of the session. The
        session may be cut back that far, but not further."""
        roles = [message["role"] for message in prompt.messages]
        num_first = roles.index(ASSISTANT) if ASSISTANT in roles else len(roles)
        first = replace(prompt, messages=prompt.messages[:num_first]) if num_first else prompt
        if kept_len >= len(self._text.encode_prompt(first)) - 1:
            return
        index = min(self._text.num_agreed(prompt, turn.history), len(roles) - 1)
        raise HistoryDiffers(
            f"messages[{index}]: the history of {named(turn.session_id)} has another message there. Send the messages "
            "that it has, or only new ones with x-session-mode: append, or open another session.",
            f"messages[{index}]",
        )

    def _looked_at(self, prompt: ChatPrompt, turn: Turn) -> PlacedPrompt:
        """Places messages of which none is an answer. They are new messages; a system message that the history begins
        with is left out. Raises AmbiguousHistory if the history begins with all of them and no second turn has shown
        yet that the client sends new messages only."""
        if turn.turn_index <= 1 and self._text.begins(turn.history, prompt):
            raise AmbiguousHistory(
                f"messages: {named(turn.session_id)} began with just these. Send x-session-mode: append to say them "
                "again, or full to have them answered anew.",
                "messages",
            )
        num_head, num_told = head_len(prompt.messages), 0
        if 0 < num_head < len(prompt.messages):
            head = self._text.head_tokens(prompt)
            if common_len(turn.history[: len(head)], head) == len(head):
                prompt, num_told = replace(prompt, messages=prompt.messages[num_head:]), num_head
        return self._appended(prompt, turn, num_told)


def _is_whole(call: TurnCall, prompt: ChatPrompt, turn: Turn) -> bool:
    """Whether the messages are all of the conversation."""
    return _sends_whole(call, turn) or any(message["role"] == ASSISTANT for message in prompt.messages)


def _sends_whole(call: TurnCall, turn: Turn) -> bool:
    """Whether the client is known to send all of the conversation each time."""
    return turn.whole or call.session is None or call.session.mode == "full"


def _kept(token_ids: list[int], keep_last: int | None) -> list[int]:
    return token_ids if keep_last is None else token_ids[-keep_last:]


def _known(prompt: ChatPrompt, turn: Turn) -> list[Checkpoint]:
    """The turn's checkpoints that the prompt continues, newest first."""
    said = {each.num_messages: each.digest for each in prompt.said}
    return [
        each
        for each in reversed(turn.checkpoints)
        if each.length <= turn.history_len and said.get(each.num_messages) == each.digest
    ]


def _rendered_from(prompt: ChatPrompt, known: Sequence[Checkpoint]) -> Checkpoint | None:
    """The checkpoint to render from.

    Templates may render messages before the last user message differently, for example without the model's thoughts. So
    if the prompt has a new user message, rendering begins at the user message before it.
    """
    if not known or USER not in _roles(prompt, known[0].num_messages):
        return known[0] if known else None
    asked = (each for each in known if prompt.messages[each.num_messages - 1]["role"] == USER)
    return next(asked, None)


def _roles(prompt: ChatPrompt, start: int) -> Sequence[str]:
    return [message["role"] for message in prompt.messages[start:]]


def _checkpoint(prompt: ChatPrompt, length: int) -> Checkpoint:
    last = prompt.said[-1]
    return Checkpoint(last.num_messages, last.digest, length)
