"""A model's text: prompts to token ids, token ids to text (output_text.py follows a request's output).

The cost of a turn here depends on the turn alone, never on the session's history.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace
from tokenizers import Tokenizer

from controllers.records import ModelFingerprint
from engine.api import ContextLengthExceeded, InvalidRequest, TokenLogprob
from engine.models.errors import BadCheckpoint
from serving.garbage import unsearched
from serving.text.bad_words import word_tokens
from serving.text.chat_template import ChatTemplate
from serving.text.control_tokens import ControlTokens
from serving.text.detokenizer import Detokenizer, NoText, TokenBytes
from serving.text.fingerprint import template_hash, tokenizer_hash
from serving.text.output_text import OutputText
from serving.text.reasoning.formats import (
    OPENER_TOKENS,
    ReasoningName,
    ReasoningSetting,
    opens_thought,
    reasoning_of,
)
from serving.text.stop_strings import StopMatcher
from serving.text.system_messages import head_len
from serving.text.tool_calls.formats import FormatName, ToolCallsSetting, format_of
from serving.wire.turns import ChatPrompt, Prompt, TextLogprob, TextPrompt, TokenPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENS_AT_ONCE = 4096
"""A history is searched in pieces of so many tokens."""

_TEMPLATE_CHARS = 256
"""The most characters that templates are expected to add to a message."""

_MOST_TOKENS = 1_000_000
"""Of a text whose model has no longer context. Most tokens of a longer text would be cut off, or only counted; and to
list a million takes some 30 ms, in which no other thread runs."""

_WORDS_AT_ONCE = 8
"""For how many requests the tokens of their words are remembered: all choices of a request have the same words."""


@dataclass(frozen=True, slots=True)
class ContinuedPrompt:
    """A prompt after a history: the history's first `kept_len` tokens, then `new_tokens`, of which there is at least
    one."""

    kept_len: int
    new_tokens: list[int]


class TextProcessor:
    """The tokenizer and chat template of one model; shared by all requests, safe to use from any thread.

    Without a tokenizer only token ids go in and out. `vocab_size` is the model's, which may be larger than the
    tokenizer's. `max_context_len` (tokens) allows absurdly long texts to be refused before they are tokenized.
    `tokenizer_hash` identifies what each id stands for.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, *, vocab_size: int, max_context_len: int
    ) -> None:
        self._vocab_size = vocab_size
        self._max_context_len = max_context_len
        self._bos_id: int | None = None
        self._unknown_id: int | None = None
        self._backend: Tokenizer | None = None
        self._token_bytes: TokenBytes | None = None
        self._chat_template: ChatTemplate | None = None
        self._control_tokens: ControlTokens | None = None
        if tokenizer is not None:
            self._bos_id = tokenizer.bos_token_id
            self._unknown_id = tokenizer.unk_token_id
            self._backend = _backend_of(tokenizer)
            self._token_bytes = TokenBytes(self._backend)
            self._control_tokens = ControlTokens(self._backend)
            self._word_tokens = lru_cache(_WORDS_AT_ONCE)(partial(word_tokens, self._backend))
            if tokenizer.chat_template is not None:
                self._chat_template = ChatTemplate(tokenizer)
        self.tokenizer_hash = tokenizer_hash(self._backend, vocab_size)

    @classmethod
    def load(cls, path: str, *, vocab_size: int, max_context_len: int) -> TextProcessor:
        """From a Hugging Face directory (which may lack a tokenizer) or a hub id. Raises BadCheckpoint."""
        with unsearched():  # this imports transformers, which takes seconds
            from serving.text.tokenizer_files import load_tokenizer

        try:
            tokenizer = load_tokenizer(path)
        except Exception as error:
            # transformers raises anything, and says neither that it is the tokenizer nor whose.
            reason = f"{type(error).__name__}: {error}"
            raise BadCheckpoint(f"{path}: the tokenizer cannot be read: {reason}") from error
        return cls(tokenizer, vocab_size=vocab_size, max_context_len=max_context_len)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Must not be changed."""
        return self._backend

    def fingerprint(self, weights: str | None) -> ModelFingerprint:
        """The model's fingerprint; the engine knows its `weights`."""
        template = "" if self._chat_template is None else self._chat_template.text_with_tools
        return ModelFingerprint(self.tokenizer_hash, weights, template_hash(template))

    def encode_prompt(
        self, prompt: Prompt, *, history_len: int = 0, last_token: int | None = None
    ) -> list[int]:
        """The token ids that a turn adds to `history_len` committed tokens, the last of which is `last_token`.

        Raises InvalidRequest or ContextLengthExceeded, naming `prompt` or `messages`.
        """
        match prompt:
            case TokenPrompt():
                token_ids = self._checked_ids(prompt.token_ids)
            case TextPrompt():
                special = history_len == 0 and prompt.add_special_tokens
                token_ids = self._encode(prompt.text, "prompt", add_special_tokens=special)
            case ChatPrompt():
                token_ids = self._encode_chat(prompt, history_len > 0, last_token)
        if history_len > 0 and token_ids and token_ids[0] == self._bos_id:
            del token_ids[0]
        if not token_ids:
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            raise InvalidRequest("The prompt has no tokens.", param)
        return token_ids

    def begins(self, history: Sequence[int], prompt: ChatPrompt) -> bool:
        """Whether the history begins with the tokens of `encode_prompt`, all of them. Raises what that raises.

        Mostly the messages differ. So these are compared first, where they would be in the history. Then the tools,
        which a client repeats at each turn, need not become tokens."""
        template, control_tokens = self._chat()
        guarded, mark = control_tokens.guard(prompt)
        if mark is None and not prompt.add_special_tokens:
            text = _rendered(template, guarded)
            self._check_len(len(text), "messages")
            part = control_tokens.last_part(text, _chars_of(prompt) + _TEMPLATE_CHARS * len(prompt.messages))
            if part is not None and part.token_id != self._unknown_id:
                tokens = self._encode(text[part.start :], "messages")
                place = _place_of(history, part.token_id, part.count)
                if place is None or common_len(history[place : place + len(tokens)], tokens) < len(tokens):
                    return False
        whole = self.encode_prompt(prompt)
        return common_len(history[: len(whole)], whole) == len(whole)

    def encode_conversation(self, prompt: ChatPrompt, history: Sequence[int]) -> ContinuedPrompt:
        """The tokens of a whole conversation: exactly those of `encode_prompt` without a history, with as many as
        possible taken from `history`. Raises InvalidRequest and ContextLengthExceeded, naming `messages`."""
        return _continued(history, 0, self.encode_prompt(prompt))

    def encode_answered(
        self, prompt: ChatPrompt, history: Sequence[int], *, num_asked: int, asked_len: int
    ) -> ContinuedPrompt | None:
        """The same, if the first `num_asked` messages are known to be the history's first `asked_len` tokens, including
        the opening of an answer. They are neither rendered nor tokenized again. None if the template does not allow it.
        Raises InvalidRequest and ContextLengthExceeded, naming `messages`."""
        behind = self._encode_answered(prompt, history, num_asked, asked_len)
        return None if behind is None else _continued(history, *behind)

    def num_agreed(self, prompt: ChatPrompt, history: Sequence[int]) -> int:
        """How many messages of the prompt the history begins with. May render the prompt O(log messages) times."""
        template, control_tokens = self._chat()
        guarded, mark = control_tokens.guard(prompt)

        def agrees(count: int) -> bool:
            messages = guarded.messages[:count]
            try:
                text = template.render(messages, guarded.template_kwargs, guarded.tools, answers=False)
            except InvalidRequest:  # such as for a system message alone
                return True
            token_ids = self._encode(text, "messages", cut_at=mark)
            return common_len(history[: len(token_ids)], token_ids) == len(token_ids)

        return bisect_left(range(1, len(prompt.messages) + 1), True, key=lambda count: not agrees(count))

    def head_tokens(self, prompt: ChatPrompt) -> list[int]:
        """The tokens at the beginning of every conversation with this prompt's system messages, tools and template
        arguments. Raises InvalidRequest."""
        template, control_tokens = self._chat()
        guarded, mark = control_tokens.guard(prompt)
        head = guarded.messages[: head_len(guarded.messages)]
        texts = template.render_head(head, guarded.template_kwargs, guarded.tools)
        first, second = (self._encode(text, "messages", cut_at=mark) for text in texts)
        return first[: common_len(first, second)]

    def opening_len(self, prompt: ChatPrompt, token_ids: Sequence[int]) -> int:
        """How many tokens at the end of a prompt only open the answer. `token_ids` are the prompt's last ones. 0 if
        that cannot be determined."""
        template, control_tokens = self._chat()
        guarded, mark = control_tokens.guard(replace(prompt, messages=(), tools=()))
        opening = self._encode(template.opening(guarded.template_kwargs), "messages", cut_at=mark)
        return len(opening) if opening and list(token_ids[-len(opening) :]) == opening else 0

    def tokenize(self, prompt: ChatPrompt | TextPrompt, *, add_special_tokens: bool) -> list[int]:
        """The tokens of a prompt at the beginning of a sequence; there may be none. Raises InvalidRequest and
        ContextLengthExceeded, naming `prompt` or `messages`."""
        if isinstance(prompt, TextPrompt):
            return self._encode(prompt.text, "prompt", add_special_tokens=add_special_tokens)
        return self._encode_chat(prompt, False, None)

    def token_strs(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """The tokens' names in the vocabulary; empty for ids that only the model has."""
        if self._backend is None:
            return ("",) * len(token_ids)
        return tuple(self._backend.id_to_token(token_id) or "" for token_id in token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence. Raises InvalidRequest, naming `prompt`."""
        if self._backend is None:
            raise InvalidRequest("This model has no tokenizer.", "prompt")
        # Unlike decode, the batch call lets other threads run meanwhile.
        (text,) = self._backend.decode_batch([self._checked_ids(token_ids)], skip_special_tokens)
        return str(text)

    def tool_format(self, setting: ToolCallsSetting) -> FormatName | None:
        """How the model writes function calls. `auto` reads its chat template."""
        if setting != "auto":
            return None if setting == "off" else setting
        return None if self._chat_template is None else format_of(self._chat_template.text_with_tools)

    def reasoning_format(self, setting: ReasoningSetting) -> ReasoningName | None:
        """How the model writes its thoughts. `auto` reads its chat template."""
        if setting != "auto":
            return None if setting == "off" else setting
        return None if self._chat_template is None else reasoning_of(self._chat_template.text_with_tools)

    def opens_thought(self, end: Sequence[int]) -> bool:
        """Whether a prompt that ends with these tokens has begun a thought, which the answer continues."""
        if self._backend is None:
            return False
        return opens_thought(self._backend.decode(list(end[-OPENER_TOKENS:]), skip_special_tokens=False))

    def output_text(
        self,
        stops: Sequence[str] = (),
        *,
        trim_stop: bool = True,
        skip_special_tokens: bool = True,
        shown: Sequence[str] = (),
        min_tokens: int = 0,
        before: Sequence[int] = (),
    ) -> OutputText:
        """Follows one request's output. `shown` are special tokens that are always part of its text. No stop string
        ends it within the first `min_tokens`. `before` is the end of the text that it continues. Raises InvalidRequest,
        naming `stop`."""
        detokenizer: Detokenizer = NoText()
        if self._token_bytes is None:
            if stops:
                raise InvalidRequest("This model has no tokenizer, so stop strings cannot be found.", "stop")
        else:
            detokenizer = self._token_bytes.detokenizer(
                skip_special_tokens=skip_special_tokens, shown=shown, before=before
            )
        matcher = StopMatcher(stops, keep_stop=not trim_stop)
        return OutputText(detokenizer, matcher, trim_stop=trim_stop, min_tokens=min_tokens)

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that write these words. Raises InvalidRequest, naming `bad_words`."""
        if not words:
            return ()
        if self._backend is None:
            raise InvalidRequest("This model has no tokenizer, so words cannot be found.", "bad_words")
        return self._word_tokens(tuple(words))

    def token_text(self, token_id: int) -> bytes:
        """A token's bytes by itself, which may not be a whole character."""
        if self._token_bytes is None:
            return b""
        return self._token_bytes[token_id]

    def text_logprobs(self, logprobs: Sequence[TokenLogprob]) -> tuple[TextLogprob, ...]:
        """Log-probabilities with their tokens' texts."""
        text = self.token_text
        return tuple(
            TextLogprob(entry, text(entry.token_id), tuple(text(token_id) for token_id, _ in entry.top))
            for entry in logprobs
        )

    def _chat(self) -> tuple[ChatTemplate, ControlTokens]:
        """Raises InvalidRequest for a model without chat."""
        if self._control_tokens is None:
            raise InvalidRequest("This model has no tokenizer; send token ids.", "messages")
        if self._chat_template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", "messages")
        return self._chat_template, self._control_tokens

    def _encode_chat(self, prompt: ChatPrompt, continues: bool, last_token: int | None) -> list[int]:
        template, control_tokens = self._chat()
        self._check_len(_chars_of(prompt), "messages")
        prompt, mark = control_tokens.guard(prompt)
        if not continues:
            text = _rendered(template, prompt)
            return self._encode(text, "messages", cut_at=mark, add_special_tokens=prompt.add_special_tokens)
        text = template.render_continuation(prompt.messages, prompt.template_kwargs)
        token_ids = self._encode(text, "messages", cut_at=mark)
        # The model usually ends its answer with the very token that closes it in the template.
        if token_ids and token_ids[0] == last_token and self._is_special(last_token):
            del token_ids[0]
        return token_ids

    def _encode_answered(
        self, prompt: ChatPrompt, history: Sequence[int], num_asked: int, asked_len: int
    ) -> tuple[int, list[int]] | None:
        """The tokens of everything after what was asked, from the opening of the answer on, and where in the history
        they begin. None if they cannot be determined without the messages before."""
        template, control_tokens = self._chat()
        # The earlier messages were guarded in their own turn; only the message that is rendered again must be guarded
        # here.
        behind, mark = control_tokens.guard(replace(prompt, messages=prompt.messages[num_asked - 1 :]))
        if (behind.template_kwargs, behind.tools) != (prompt.template_kwargs, prompt.tools):
            return None
        self._check_len(_chars_of(behind), "messages")
        messages = (*prompt.messages[: num_asked - 1], *behind.messages)
        answered = template.render_answered(messages, num_asked, prompt.template_kwargs, prompt.tools)
        if answered is None:
            return None
        opening = self._encode(answered.opening, "messages", cut_at=mark)
        start = asked_len - len(opening)
        # A special token separates: the text before it cannot become part of tokens after it.
        if start < 0 or not opening or not self._is_special(opening[0]):
            return None
        if list(history[start:asked_len]) != opening:
            return None
        token_ids = self._encode(answered.text, "messages", cut_at=mark)
        if not token_ids or not self._is_special(token_ids[0]):
            return None
        return start, token_ids

    def _is_special(self, token_id: int | None) -> bool:
        return self._token_bytes is not None and token_id in self._token_bytes.special_ids

    def _encode(
        self, text: str, param: str, *, add_special_tokens: bool = False, cut_at: str | None = None
    ) -> list[int]:
        """`cut_at` is a mark: the text between two marks is tokenized separately."""
        if self._backend is None or self._token_bytes is None:
            raise InvalidRequest("This model has no tokenizer; send token ids.", param)
        self._check_len(len(text), param)
        try:
            # Unlike encode, the batch call lets other threads run meanwhile: a long text takes seconds.
            first, *others = [text] if cut_at is None else text.split(cut_at)
            encodings = self._backend.encode_batch_fast([first], add_special_tokens=add_special_tokens)
            if others:
                encodings += self._backend.encode_batch_fast(others, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("The text is not valid Unicode.", param) from error
        num_tokens = sum(map(len, encodings))
        if num_tokens > max(self._max_context_len, _MOST_TOKENS):
            raise self._too_long(f"{num_tokens} tokens", param)
        return [token_id for encoding in encodings for token_id in encoding.ids]

    def _check_len(self, num_chars: int, param: str) -> None:
        """Refuses a text that can never fit before any work is done on it."""
        if self._token_bytes is not None and num_chars > self._max_context_len * self._token_bytes.longest:
            raise self._too_long(f"{num_chars} characters", param)

    def _too_long(self, length: str, param: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"The prompt is too long: {length}. This model's maximum context length is {self._max_context_len} tokens.",
            param,
        )

    def _checked_ids(self, token_ids: Sequence[int]) -> list[int]:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
            raise InvalidRequest(
                f"Token id {wrong} is outside the vocabulary of {self._vocab_size} tokens.", "prompt"
            )
        return list(token_ids)


def common_len(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of tokens that both begin with."""
    size = min(len(left), len(right))
    differs = np.flatnonzero(np.asarray(left[:size]) != np.asarray(right[:size]))
    return int(differs[0]) if len(differs) else size


def _continued(history: Sequence[int], start: int, token_ids: list[int]) -> ContinuedPrompt:
    """`token_ids` follow the history's first `start` tokens. At least one of them is new, because a turn must compute
    something."""
    known = min(common_len(history[start : start + len(token_ids)], token_ids), len(token_ids) - 1)
    return ContinuedPrompt(start + known, token_ids[known:])


def _place_of(history: Sequence[int], token_id: int, count: int) -> int | None:
    """Where the token is in the history after `count` others like it."""
    for start in range(0, len(history), _TOKENS_AT_ONCE):
        found = np.flatnonzero(np.asarray(history[start : start + _TOKENS_AT_ONCE]) == token_id)
        if count < len(found):
            return start + int(found[count])
        count -= len(found)
    return None


def _chars_of(prompt: ChatPrompt) -> int:
    return sum(len(str(message.get("content", ""))) for message in prompt.messages)


def _rendered(template: ChatTemplate, prompt: ChatPrompt) -> str:
    return template.render(
        prompt.messages,
        prompt.template_kwargs,
        prompt.tools,
        answers=prompt.opens_answer and not prompt.continues_final,
        options=_options(prompt),
    )


def _options(prompt: ChatPrompt) -> dict[str, Any]:
    """Options for rendering this prompt, by their names in transformers."""
    options: dict[str, Any] = {"continue_final_message": True} if prompt.continues_final else {}
    return options if prompt.template is None else {**options, "chat_template": prompt.template}


def _backend_of(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The fast tokenizer inside, with the checkpoint's truncation and padding turned off."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ValueError(
            f"{type(tokenizer).__name__} has no fast tokenizer (tokenizer.json), which serving needs."
        )
    copy: Tokenizer = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy
