"""What travels between ingress and replica: a turn's call, its events, and the service the protocols speak to.

Plain data. Protocol adapters (serving/front/api) translate HTTP bodies into `TurnCall` and `TurnEvent`s back;
rendering and tokenizing happen on the replica that owns the session.

Neighbouring versions read each other's records (serving/wire/calls.py): fields are only ever added, at the end and with
a default.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import msgspec

from controllers.wire_record import WIRE_VERSION
from engine.api import LogprobParams, SamplingParams, TokenLogprob
from serving.text.reasoning.formats import ReasoningName
from serving.text.tool_calls.formats import FormatName


class Said(msgspec.Struct, frozen=True, array_like=True):
    """The first `num_messages` messages of a prompt, and a hash over them and all else that it is rendered from."""

    num_messages: int
    digest: bytes


HistoryMode = Literal["append", "auto", "full"]
"""What the messages of a session's turn are: new ones; what they look like; the whole history."""


class ChatPrompt(msgspec.Struct, frozen=True, tag="chat"):
    """Chat messages, rendered with the model's template: in a session the new ones, or all of them.

    `tools` are rendered where they begin a history; later they only have to be the same. `said`: what was said before
    each answer that is among the messages, and at their end, where the prompt may be a whole history.

    The rendered text ends with what opens an answer, if `opens_answer`; or, if it `continues_final`, with the words of
    the last message. `template` is the request's own, in place of the model's. With `add_special_tokens` it begins with
    those of a text, too.
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
        """Whether it is rendered as a conversation always is."""
        own_way = self.continues_final or self.template is not None or self.add_special_tokens
        return self.opens_answer and not own_way


class TextPrompt(msgspec.Struct, frozen=True, tag="text"):
    """Plain text, tokenized as it is. A fresh sequence begins with the tokenizer's special tokens, unless
    `add_special_tokens` is false."""

    text: str
    add_special_tokens: bool = True


class TokenPrompt(msgspec.Struct, frozen=True, tag="tokens"):
    """Token ids, used as they are; the replica checks their range."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class OutputConstraint(msgspec.Struct, frozen=True):
    """What the whole output must be: JSON that fits a schema, what a regular expression matches from end to end,
    function calls (serving/text/tool_calls/grammar.py), or what a grammar writes, in Lark's notation or in EBNF. What
    `strict_calls` says is for calls in a free answer (TurnCall.strict_calls)."""

    kind: Literal["json_schema", "regex", "tool_calls", "grammar", "strict_calls"]
    source: str


class SessionTurn(msgspec.Struct, frozen=True):
    """Which session a call belongs to. `rewind_to` first cuts committed history to that many tokens.

    `create`: a session that does not exist is opened by its first turn; otherwise the turn is refused (404). `retries`:
    how often the client has sent this turn before, where it counts that (None: it does not). `open_key`: the session
    that was opened with it, and none that has its name later (None: any). `expected_turn`: the number that the turn is
    to have (None: any). `mode` is about chat messages. `note` is the protocol's own, kept with the turn in the log.
    """

    session_id: str
    rewind_to: int | None = None
    idempotency_key: str | None = None
    create: bool = True
    retries: int | None = None
    open_key: str | None = None
    expected_turn: int | None = None
    mode: HistoryMode = "append"
    note: bytes = b""


class TextLogprob(msgspec.Struct, frozen=True):
    """A TokenLogprob with the tokens' own bytes, which may be no whole characters."""

    token: TokenLogprob
    text: bytes
    top_texts: tuple[bytes, ...] = ()


class ResumedTurn(msgspec.Struct, frozen=True):
    """What a client has been told of a turn whose replica was lost: the output so far, to be gone on from.

    `turn_index` says which of its session's turns it is, `open_key` of which session of that name; None outside a
    session. `tokenizer` is that of the model which said it (None: not told).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TextLogprob, ...] = ()
    input_logprobs: tuple[TextLogprob, ...] = ()
    turn_index: int | None = None
    tokenizer: str | None = None
    open_key: str | None = None


class TurnCall(msgspec.Struct, frozen=True):
    """One generation as the protocols ask for it.

    `seed` None means: pick one. `max_new_tokens` None means: as much as the context allows. Both replace the fields of
    `sampling`. `logprobs.input_start` is an absolute position in history + new input, as in the engine. `shown_tokens`
    are special tokens that are part of the text, whatever `skip_special_tokens` says.

    `bad_words` are texts that the output may not have. Outside a session only the last `keep_last` tokens of a prompt
    may count (None: all), and prefixes of a call with a `cache_salt` are shared with calls of the same salt only.

    Outside a session calls with the same `affinity_key` go to the same replica while its load allows it. Of those that
    wait there the one with the highest `priority` goes first.

    `strict_calls` are the functions that calls in a free answer are held to (serving/front/api/openai/tools.py; None:
    such calls are free, too). It goes with no `constraint`.

    A call that `tells_accepted` has an event that says nothing, ahead of all others, once its replica has taken it: so
    its client can be answered before there is a token.

    `resumed` is set by the dispatcher alone. The replica goes on behind it, but tells the turn from its first token.
    `wire_version` is that of the front end that made the call. `http_request_id` is for logs; `traceparent` and
    `tracestate`, as W3C has them, for spans: the dispatcher sets them, if it traces.
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
    priority: int = 0
    strict_calls: str | None = None
    http_request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""
    tells_accepted: bool = False

    @property
    def may_go_on(self) -> bool:
        """Whether its messages may be those of a conversation that is known: all of them count, as always."""
        usual = isinstance(self.prompt, ChatPrompt) and self.prompt.is_usual
        return usual and self.keep_last is None and not self.cache_salt

    def named(self, request_id: str | None, tenant: str) -> bool:
        """Whether who names `request_id` of `tenant` means this call; None names all of the tenant's."""
        return self.tenant == tenant and request_id in (None, self.request_id)


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error as data: it crosses process borders without pickling exceptions. `status` is the HTTP status."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class TurnFinish(msgspec.Struct, frozen=True):
    """How the turn ended. `reason` is "stop", "length" or "abort"; `matched` is the stop token id or string."""

    reason: str
    matched: int | str | None = None
    message: str | None = None


class TurnEvent(msgspec.Struct, frozen=True, array_like=True, tag="event"):
    """What is new of a turn: text and token ids since the last event, totals so far; the last has finish or error.

    `draft_tokens` were proposed ahead of the model, `accepted_draft_tokens` of them were what it would have said.
    `turn_index` says which of its session's turns it is, `open_key` of which session of that name; None outside a
    session. `replayed`: it ran before, under the same idempotency key, and this is the answer from the log.
    `tokenizer` tells whose tokens these are (serving/text/fingerprint.py). `in_thought`: the turn's prompt has begun
    a thought, with which its text goes on.
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

    @property
    def says_nothing(self) -> bool:
        """Whether nothing of it is for a client: it may tell that the turn is accepted."""
        said = (self.text, self.token_ids, self.logprobs, self.input_logprobs, self.finish, self.error)
        return not any(said)


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A prompt's tokens; `token_strs` are their names in the vocabulary, if they were asked for."""

    token_ids: tuple[int, ...]
    token_strs: tuple[str, ...] = ()


class ServiceError(Exception):
    """Raised by TurnService; carries what the client is to be told."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


class SamplingDefaults(msgspec.Struct, frozen=True):
    """How its makers would have a model sampled, where a request says nothing. `max_new_tokens` bounds every answer."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None


class ModelInfo(msgspec.Struct, frozen=True):
    """What the protocols report of the served model. `tool_calls` and `reasoning`: the formats of its function
    calls and of its thoughts, if it has them.
    `aliases` are the names beside `model_id` that requests may give it."""

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


class SessionInfo(msgspec.Struct, frozen=True):
    """A session as the ledger knows it. Times are seconds."""

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
    """What the session log keeps of a turn beside its tokens. Versions only add fields, with a default.

    `messages` are those that the turn added behind the first `num_kept` of the conversation (None: behind all of them);
    a prompt of `text` or of tokens has none. `key` is its idempotency key, `note` the protocol's (see SessionTurn). The
    `answer` had `num_output` tokens; `in_thought` as in TurnEvent.
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


class TurnTranscript(msgspec.Struct, frozen=True):
    """A committed turn as the session log has it; lengths are tokens of the history.

    The turn went on from the first `start_len`; its input ends at `asked_len`, its answer at `end_len`, or behind that
    if it `is_cut`. In a fork `turn_index` is negative for turns of its parent.
    """

    turn_index: int
    start_len: int
    asked_len: int
    end_len: int
    said: SaidTurn = SaidTurn()

    @property
    def is_cut(self) -> bool:
        """Whether a later turn went on from within its answer."""
        return self.end_len - self.asked_len < self.said.num_output


class ForkedSession(msgspec.Struct, frozen=True):
    """A session that began as a fork: its committed tokens, and how many of them have KV already."""

    session_id: str
    tokens: int
    cached_tokens: int


class MovedSession(msgspec.Struct, frozen=True):
    """Who owns a session that was to move, and at which epoch; `from_id` is who owned it before, the same if it was
    there already."""

    from_id: str
    replica_id: str
    epoch: int


class WatchedItem(msgspec.Struct, frozen=True):
    """Something for those who watch the cluster: a "state" or an "event" (serving/watch/cluster_state.py), as JSON."""

    name: str
    data: bytes


class TurnService(Protocol):
    """The cluster as the protocol adapters see it. Implemented in serving/front/cluster_client.py.

    Every method raises ServiceError for errors that the client is to be told.
    """

    @property
    def model(self) -> ModelInfo: ...

    def run(self, call: TurnCall) -> AbstractAsyncContextManager[AsyncIterator[TurnEvent]]:
        """Streams a turn's events, each at least one token or the end, but for the first of a call that
        `tells_accepted`. Leaving the context early (client
        disconnect) aborts the turn. Errors after admission arrive as an event; refusals raise ServiceError on entry:
        entering the context waits for the first event."""

    async def open_session(
        self,
        session_id: str | None,
        *,
        timeout_s: float | None,
        capacity_tokens: int | None,
        tenant: str,
        tree: bool = False,
    ) -> str:
        """Registers and places a session; returns its id. A `tree` takes no turns, only forks. A duplicate id raises
        (400, "session_exists")."""

    async def is_tree(self, session_id: str, *, tenant: str) -> bool:
        """Whether the session was opened as a tree. Raises (404) for an unknown one."""

    async def fork_session(
        self,
        session_id: str,
        new_session_id: str | None,
        *,
        length: int | None,
        timeout_s: float | None,
        tenant: str,
    ) -> ForkedSession:
        """Starts a session at the first `length` tokens (None: all) of another, sharing their KV. Raises (404) for an
        unknown session, (409) while it has a turn, (400) for a length past its history or an id that is in use."""

    async def rewind_session(self, session_id: str, length: int, *, tenant: str) -> None:
        """Keeps the first `length` committed tokens of the session, which counts as a turn that says nothing. Raises
        (404) for an unknown session, (409) while it has a turn, (400) for a length past its history."""

    async def move_session(self, session_id: str, to: str | None, *, tenant: str) -> MovedSession:
        """Moves the session to the replica `to` (None: to the best of the others), between its turns; its history goes
        along, its KV does not. Raises (404) for an unknown session, (400, "invalid_move") for an unknown replica, (409)
        while it has a turn, and (503, "no_replica") where that replica, or every other one, takes no sessions."""

    async def keep_note(
        self, session_id: str, note: bytes, *, expected_turn: int | None, tenant: str
    ) -> None:
        """Commits a turn that says nothing and has this note. `expected_turn` is the number that it is to have (None:
        any). Raises (404) for an unknown session, (409, "turn_in_flight") while it has a turn, and
        (409, "turn_differs")."""

    async def close_session(self, session_id: str, *, tenant: str) -> bool:
        """Closes now, or when the turn in flight ends. False if the session was unknown."""

    async def abort(self, request_id: str | None, *, all_requests: bool = False, tenant: str) -> None:
        """Aborts one request of the tenant (unknown ids are ignored) or all of them, on every replica."""

    async def tokenize(
        self, prompt: ChatPrompt | TextPrompt, *, add_special_tokens: bool, with_token_strs: bool
    ) -> TokenizedPrompt:
        """What the prompt is to the model, outside a session. `add_special_tokens` is about texts."""

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens of the model; characters that are broken are U+FFFD."""

    async def flush(self) -> bool:
        """Drops cached prefixes on every replica; False if any replica was busy."""

    async def drain_replica(self, replica_id: str) -> None:
        """Has the replica hand its sessions over, end its turns and end itself; it is replaced then. Returns at once.

        Raises (404, "replica_not_found"), and (503, "no_replica") where no other could take its sessions."""

    async def sessions(self, *, tenant: str | None, after: str | None, limit: int) -> list[SessionInfo]:
        """The first `limit` sessions of the tenant (None: of all tenants) behind the session key `after`, which need
        not be there; in the order of tenants and ids."""

    async def session(self, session_id: str, *, tenant: str) -> SessionInfo | None:
        """None: the tenant has none of that id."""

    async def transcript(self, session_id: str, *, tenant: str) -> list[TurnTranscript]:
        """The turns that the session's history is of, oldest first. Raises (404, "session_not_found")."""

    async def forget_note(self, session_id: str, turn_index: int, *, tenant: str) -> None:
        """The turn's note is empty from now on. What is not there is fine."""

    async def server_info(self) -> dict[str, Any]:
        """Settings and per-replica figures, JSON ready."""

    async def audit(self) -> dict[str, Any]:
        """What a walk over every KV page of every replica found, JSON ready (serving/watch/audit_reply.py)."""

    def watch(
        self, interval_s: float, limit: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Sequence[WatchedItem]]]:
        """What is to be seen of the cluster, from now on: its state every `interval_s`, with `limit` sessions at most,
        and events, the last ones first. Waiting for the next items may be cancelled. Raises (503, "too_many_watchers")
        on entry; and (503, "watcher_too_slow") where too much was not read."""

    async def metrics_text(self) -> str:
        """Prometheus exposition of every replica, the controller and every ingress."""

    async def healthy(self) -> bool: ...
