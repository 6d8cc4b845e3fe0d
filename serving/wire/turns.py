"""The data that front ends and replicas exchange: a turn's call and its events.

Protocol adapters (serving/front/api) translate HTTP bodies into `TurnCall`, and `TurnEvent`s into replies. Rendering
and tokenizing happen on the replica that owns the session.

Neighbouring versions read each other's records (serving/wire/calls.py): fields are only ever added, at the end and with
a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from controllers.wire_record import WIRE_VERSION
from engine.api import LogprobParams, SamplingParams, TokenLogprob
from serving.text.reasoning.formats import ReasoningName
from serving.text.tool_calls.formats import FormatName


class Said(msgspec.Struct, frozen=True, array_like=True):
    """The first `num_messages` messages of a prompt. `digest` is a hash of them and of all else that affects
    rendering."""

    num_messages: int
    digest: bytes


HistoryMode = Literal["append", "auto", "full"]
"""What the messages of a session's turn are. "append": new messages. "full": the whole history. "auto": either of the
two, which the replica tells from the messages."""


class ChatPrompt(msgspec.Struct, frozen=True, tag="chat", weakref=True):
    """Chat messages, rendered with the model's template. In a session they are the new messages, or all of them.

    `tools` are rendered only at the beginning of a history. Later turns may only name the same tools. If the prompt may
    be a whole history, `said` has an entry for the messages before each answer, and one for all messages.

    With `opens_answer` the rendered text ends with what opens an answer. With `continues_final` it ends with the words
    of the last message. `template` is the request's own, used instead of the model's. With `add_special_tokens` the
    tokens also begin with the tokenizer's special tokens, as those of a plain text do.
    """

    messages: tuple[Mapping[str, Any], ...]
    template_kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    said: tuple[Said, ...] = ()
    opens_answer: bool = True
    continues_final: bool = False
    template: str | None = None
    add_special_tokens: bool = False

    @property
    def is_usual(self) -> bool:
        """Whether it is rendered in the usual way, with none of the options that change this."""
        own_way = self.continues_final or self.template is not None or self.add_special_tokens
        return self.opens_answer and not own_way


class TextPrompt(msgspec.Struct, frozen=True, tag="text", weakref=True):
    """Plain text, tokenized as it is. A new sequence begins with the tokenizer's special tokens, unless
    `add_special_tokens` is false."""

    text: str
    add_special_tokens: bool = True


class TokenPrompt(msgspec.Struct, frozen=True, tag="tokens", weakref=True):
    """Token ids, used as they are. The replica checks their range."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class OutputConstraint(msgspec.Struct, frozen=True):
    """What the whole output must be: JSON that fits a schema, a full match of a regular expression, function calls
    (serving/text/tool_calls/grammar.py), or a sentence of a grammar in Lark's notation or in EBNF. The kind
    `strict_calls` constrains only the calls in a free answer (TurnCall.strict_calls)."""

    kind: Literal["json_schema", "regex", "tool_calls", "grammar", "strict_calls"]
    source: str


Fallback = Literal["elsewhere", "unnamed"]


class SessionTurn(msgspec.Struct, frozen=True):
    """The session a call belongs to.

    With `create`, the turn opens a session that does not exist; otherwise it is refused (404). `retries` is how often
    the client has sent this turn before (None: it does not count). `open_key` means the session that was opened with
    this key, and no later one of the same name (None: any). `expected_turn` is the number that the turn must have
    (None: any). `mode` says what chat messages are. `note` belongs to the protocol and is kept with the turn in the
    log. `timeout_s` is the idle timeout of a session that the turn opens (None: the default).

    `fallback` says what happens if the session does not take the turn. "elsewhere": the caller runs it in another
    session. "unnamed": the dispatcher runs it without a session. In both cases the turn does not wait long for another
    one to end.
    """

    session_id: str
    idempotency_key: str | None = None
    create: bool = True
    retries: int | None = None
    open_key: str | None = None
    expected_turn: int | None = None
    mode: HistoryMode = "append"
    note: bytes = b""
    timeout_s: float | None = None
    fallback: Fallback | None = None


class TextLogprob(msgspec.Struct, frozen=True):
    """A TokenLogprob with the bytes of the tokens, which may be parts of characters."""

    token: TokenLogprob
    text: bytes
    top_texts: tuple[bytes, ...] = ()


class ResumedTurn(msgspec.Struct, frozen=True):
    """What a client has received of a turn whose replica was lost: the output so far. The turn continues from there.

    `turn_index` is the turn's number in its session, and `open_key` identifies that session among those of its name.
    Both are None outside a session. `tokenizer` is that of the model that wrote the output (None: not told).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TextLogprob, ...] = ()
    input_logprobs: tuple[TextLogprob, ...] = ()
    turn_index: int | None = None
    tokenizer: str | None = None
    open_key: str | None = None


class TurnCall(msgspec.Struct, frozen=True):
    """One generation as the protocols ask for it.

    `seed` None means: pick one. `max_new_tokens` None means: as many as the context allows. Both replace the fields of
    `sampling`. `logprobs.input_start` is an absolute position in history + new input, as in the engine. `shown_tokens`
    are special tokens that are part of the text, whatever `skip_special_tokens` says.

    `bad_words` are texts that the output must not contain. Outside a session, `keep_last` keeps only the last tokens of
    the prompt (None: all). A call with a `cache_salt` shares prefixes only with calls of the same salt.

    Outside a session, calls with the same `affinity_key` go to the same replica while its load allows it. Of the
    requests that wait there, the one with the highest `priority` goes first. Without `may_be_kept` nothing that it says
    gets into the session log.

    `strict_calls` are the functions whose schemas the calls in a free answer must follow
    (serving/front/api/answers/tools.py). None: such calls are free, too. It cannot be combined with `constraint`.

    With `tells_accepted` the replica first sends an empty event once it has accepted the turn. So the front end can
    begin to answer the client before there is a token.

    `adapter` is the name of the model's adapter that computes the call; "" is none. `part_of` is the id that the client
    knows, of a request with several generations; "" if `request_id` is that.

    Only the dispatcher sets `resumed`. The replica continues the output after it, but sends events from the turn's
    first token. `wire_version` is that of the front end that made the call. `http_request_id` is for logs,
    `traceparent` and `tracestate` (W3C) are for spans. The dispatcher sets the last two if it traces.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    trim_stop: bool = True
    skip_special_tokens: bool = True
    shown_tokens: tuple[str, ...] = ()
    logprobs: LogprobParams | None = None
    constraint: OutputConstraint | None = None
    session: SessionTurn | None = None
    tenant: str = ""
    resumed: ResumedTurn | None = None
    wire_version: int = WIRE_VERSION
    bad_words: tuple[str, ...] = ()
    keep_last: int | None = None
    cache_salt: str = ""
    affinity_key: str = ""
    may_be_kept: bool = True
    priority: int = 0
    strict_calls: str | None = None
    http_request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""
    tells_accepted: bool = False
    adapter: str = ""
    part_of: str = ""

    @property
    def may_go_on(self) -> bool:
        """Whether its messages may continue a known conversation: it is a usual chat prompt, whole and without a
        salt."""
        usual = isinstance(self.prompt, ChatPrompt) and self.prompt.is_usual
        return usual and self.keep_last is None and not self.cache_salt

    def named(self, request_id: str | None, tenant: str) -> bool:
        """Whether `request_id` of `tenant` means this call or its whole request. None: all calls of the tenant."""
        own = (None, self.request_id, self.part_of or self.request_id)
        return self.tenant == tenant and request_id in own


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error as data: it crosses process borders without pickling exceptions. `status` is the HTTP status."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class TurnFinish(msgspec.Struct, frozen=True):
    """How the turn ended. `reason` is "stop", "length" or "abort". `matched` is the stop token id or string."""

    reason: str
    matched: int | str | None = None
    message: str | None = None


class TurnEvent(msgspec.Struct, frozen=True, array_like=True, tag="event"):
    """News of a turn: text and token ids since the last event, and totals so far. The last event has finish or error.

    `draft_tokens` counts the tokens that speculation proposed, `accepted_draft_tokens` those that the model accepted.
    `turn_index` is the turn's number in its session, and `open_key` identifies that session among those of its name.
    Both are None outside a session. `replayed`: the turn ran before with the same idempotency key, and this is the
    answer from the log. `tokenizer` tells whose tokens these are (serving/text/fingerprint.py). `in_thought`: the
    turn's prompt ends within a thought, which its text continues. `ended_s`: in the last event, the Unix time of the
    turn's end; None from a version or a log without it.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    logprobs: tuple[TextLogprob, ...] = ()
    input_logprobs: tuple[TextLogprob, ...] = ()
    finish: TurnFinish | None = None
    error: ErrorInfo | None = None
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    turn_index: int | None = None
    replayed: bool = False
    tokenizer: str | None = None
    open_key: str | None = None
    in_thought: bool = False
    ended_s: float | None = None

    @property
    def is_committed(self) -> bool:
        """Whether it ends the turn, and the turn was not aborted: if it was in a session, the session has it."""
        return self.finish is not None and self.finish.reason != "abort"

    @property
    def says_nothing(self) -> bool:
        """Whether it has nothing for the client, such as the event that says that the turn is accepted."""
        said = (self.text, self.token_ids, self.logprobs, self.input_logprobs, self.finish, self.error)
        return not any(said)


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A prompt's tokens. `token_strs` are their names in the vocabulary, if the call asked for these."""

    token_ids: tuple[int, ...]
    token_strs: tuple[str, ...] = ()


class ServiceError(Exception):
    """An error of a call. `info` is what the client gets."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


class SamplingDefaults(msgspec.Struct, frozen=True):
    """The model's own sampling defaults, for what a request does not set. `max_new_tokens` bounds every answer."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None


class ModelInfo(msgspec.Struct, frozen=True):
    """What the protocols report of the served model. `tool_calls` and `reasoning` are the formats of its function calls
    and of its thoughts, if it has these. `aliases` are further names that requests may use for the model. `adapters`
    are the paths of its adapters, by the names that requests use. It was `created` when its replica started (Unix
    time, seconds)."""

    model_id: str
    model_path: str
    tokenizer_path: str
    max_context_len: int
    vocab_size: int
    created: int
    tool_calls: FormatName | None = None
    sampling: SamplingDefaults = SamplingDefaults()
    aliases: tuple[str, ...] = ()
    reasoning: ReasoningName | None = None
    adapters: Mapping[str, str] = msgspec.field(default_factory=dict)


class SessionInfo(msgspec.Struct, frozen=True):
    """A session as the ledger knows it. Times are in seconds."""

    session_id: str
    replica_id: str | None
    epoch: int
    tokens: int
    size_bytes: int
    turns: int
    idle_s: float
    in_turn: bool
    tenant: str = ""


class SaidTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the session log keeps of a turn besides its tokens. Versions only add fields, with a default.

    `messages` are those that the turn added after the first `num_kept` of the conversation (None: after all of them).
    Turns with a `text` or token prompt have none. `key` is the turn's idempotency key, `note` the protocol's (see
    SessionTurn). The `answer` had `num_output` tokens. `in_thought` and `ended_s` are as in TurnEvent.
    """

    num_kept: int | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str | None = None
    answer: str = ""
    finish: TurnFinish | None = None
    key: str | None = None
    note: bytes = b""
    num_output: int = 0
    cached_tokens: int = 0
    in_thought: bool = False
    ended_s: float | None = None


class TurnTranscript(msgspec.Struct, frozen=True):
    """A committed turn as the session log has it. Lengths are in tokens of the history.

    The turn continued from the first `start_len` tokens. Its input ends at `asked_len` and its answer at `end_len`. If
    it `is_cut`, the answer was longer. In a fork `turn_index` is negative for turns of the parent.
    """

    turn_index: int
    start_len: int
    asked_len: int
    end_len: int
    said: SaidTurn = SaidTurn()

    @property
    def is_cut(self) -> bool:
        """Whether a later turn continued from within its answer."""
        return self.end_len - self.asked_len < self.said.num_output


class ForkedSession(msgspec.Struct, frozen=True):
    """A session that began as a fork: its committed tokens, and how many of them already have KV."""

    session_id: str
    tokens: int
    cached_tokens: int


class MovedSession(msgspec.Struct, frozen=True):
    """The outcome of a move: the replica that now owns the session, and its epoch. `from_id` is the owner before, which
    is the same replica if the session did not have to move."""

    from_id: str
    replica_id: str
    epoch: int
