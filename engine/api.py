"""The engine's public face: requests in, deltas out, typed errors. Plain data, no tensors.

`GenerateRequest` describes one generation. A session's turn hands in its committed history by
reference (never copied) and only the new tokens of the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from cache.audit import AuditReport, PageAccounts, TierAccounts
from cache.slots import KVPlace
from cache.token_chain import TokenChain

DEFAULT_MAX_NEW_TOKENS = 128


class EngineError(Exception):
    """Base of every error that the engine answers a request with.

    `code` is stable and machine readable; `param` names the request field at fault, if one is.
    """

    code = "engine_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(EngineError):
    """A field of the request is out of its range."""

    code = "invalid_request"


class ContextLengthExceeded(EngineError):
    """Prompt plus history is longer than the model's context."""

    code = "context_length_exceeded"


class RequestTooLarge(EngineError):
    """The request alone could never fit into the KV pool."""

    code = "request_too_large"


class SessionBusy(EngineError):
    """The session has a turn in flight; the operation needs it idle."""

    code = "session_busy"


class EngineOverloaded(EngineError):
    """The waiting queue is full, or a step takes too long; try again later."""

    code = "overloaded"


class EngineStopped(EngineError):
    """The engine is shut down or its step loop died."""

    code = "engine_stopped"


class ConstraintFailed(EngineError):
    """The request's constraint cannot be followed any further; the request was rolled back."""

    code = "constraint_failed"


class StepFailed(EngineError):
    """The model step that carried this request raised; the request was rolled back."""

    code = "step_failed"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens. `temperature == 0` is greedy; `top_k == 0`, `top_p == 1`, `min_p == 0` are off.

    Before `min_new_tokens` of output neither end-of-sequence tokens nor `stop_token_ids` are picked. Others than
    `allowed_token_ids` never are (None: all may be), nor what would complete one of `bad_words` in the output.
    """

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def edits_logits(self) -> bool:
        """True if logits change before the pick, so that plain argmax of the model's logits is not enough."""
        return self.penalizes or bool(self.logit_bias)

    @property
    def penalizes(self) -> bool:
        """True if they change by the tokens so far."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True)
class LogprobParams:
    """Which log-probabilities (of the raw model distribution, natural log) to report.

    `input_start` is an absolute position in history + new tokens. From there on each has an entry; KV of the history
    past it is computed again for its logits.
    """

    output: bool = False
    top: int = 0
    input_start: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of `token_id` at its position (None for the very first token of a sequence)."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class TextWatcher(Protocol):
    """Follows a request's output text on the engine's thread to find stop strings. It sees every accepted token, in
    order and once, before the delta that has it leaves; but not one of the request's stop tokens, which ends it anyway.
    """

    def accept(self, token_id: int) -> str | None:
        """The stop string that the text up to and including that token completes."""


class TokenConstraint(Protocol):
    """What a request may say, token by token. Used on the engine's thread, which reads it after each `accept`.

    It speaks of text alone: the model's end-of-sequence tokens are the engine's, which allows them where the output
    `may_end`. Whatever it raises ends its request; ConstraintFailed says why.

    It may hold parts of an output only. Where they begin and end follows from the tokens so far, however they were
    picked: of a token that begins a part nothing is asked before.
    """

    @property
    def holds(self) -> bool:
        """Whether it says what may be next. Else anything may, and nothing but `accept` and `complete` is asked."""

    @property
    def may_end(self) -> bool:
        """Whether the output so far is whole."""

    @property
    def complete(self) -> bool:
        """Whether it is whole and nothing may follow."""

    def allowed(self) -> bytes:
        """A bit for each token of the model, the least significant first, in whole bytes: whether it may be next."""

    def accept(self, token_id: int) -> None:
        """The next token, which was allowed if it `holds`."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """One generation. The model sees `history[:history_len]` followed by `new_tokens`.

    Ownership: `history` is read by the engine's thread until the final delta; its owner must not change the
    first `history_len` entries before that. A request with `session_id` continues (or starts) that session's KV, as far
    as it is KV of this history. `history_chain` begins with the same tokens (see Engine.empty_chain) and is lent in the
    same way; without it the engine hashes the history itself.

    `resumed_tokens` are output that another engine has made. They count as this one's own, and the request goes on
    behind them. The first delta tells them again; log-probabilities, those of the input included, are not computed
    for what was made there.

    `on_admitted` is called on the engine's thread each time that the request begins to run, before a step of it.
    """

    request_id: str
    new_tokens: Sequence[int]
    sampling: SamplingParams
    history: Sequence[int] = ()
    history_len: int = 0
    history_chain: TokenChain | None = None
    session_id: str | None = None
    namespace: str = ""
    priority: int = 0
    logprobs: LogprobParams | None = None
    watcher: TextWatcher | None = None
    constraint: TokenConstraint | None = None
    resumed_tokens: Sequence[int] = ()
    on_admitted: Callable[[], None] | None = None

    @property
    def prompt_len(self) -> int:
        return self.history_len + len(self.new_tokens)


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended. `matched` is the stop token id or stop string; `error` is set for ERROR only."""

    reason: FinishReason
    matched: int | str | None = None
    message: str | None = None
    error: EngineError | None = None


@dataclass(slots=True)
class TokenDelta:
    """News of one request, never changed (a frozen one takes ten times as long to make, and every token has one).
    Token ids are new since the last delta; counts are totals so far.

    `prompt_tokens` counts history and new tokens, `cached_tokens` the part whose KV was already there.
    `draft_tokens` were proposed so far, `accepted_draft_tokens` of them agreed with the model. `queued_s` it waited for
    its first step.
    The last delta of a request, and only that one, carries `finish`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    input_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True)
class KVCensus:
    """Whose KV it is: `num_bytes` by namespace and tier (device, host, disk), pages that several share not among them;
    and the sessions that have a slot."""

    num_bytes: Mapping[tuple[str, str], int]
    sessions: frozenset[str]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot published by the step loop; safe to read from any thread.

    `window_pages` are the books of the pool of sliding-window layers, if the model has any; `window_len` in tokens.
    `kv_utilization` is the share of the pools that turns take and lack, above 1 where there is not enough for all.
    Demotions are of idle sessions: to host memory, from there to disk, or dropped to the token log.
    `disk_failures` are writes to disk, whose sessions stay in host memory, and reads. Everything from `steps` on counts
    since start.
    """

    pages: PageAccounts
    window_pages: PageAccounts | None
    host: TierAccounts
    disk: TierAccounts
    page_size: int
    page_size_bytes: int
    window_len: int | None
    window_page_size_bytes: int
    sessions: int
    running: int
    waiting: int
    kv_utilization: float
    steps: int
    retractions: int
    demotions_to_host: int
    demotions_to_disk: int
    demotions_to_log: int
    promotions_from_host: int
    promotions_from_disk: int
    disk_failures: int
    evicted_pages: int
    generated_tokens: int
    prefill_tokens: int
    cached_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int


DeltaSink = Callable[[Sequence[TokenDelta]], None]
"""Called on the engine's thread once per step with every delta of that step; must not block."""


class Engine(Protocol):
    """One replica's inference engine. Every method may be called from any thread and returns at once."""

    def start(self) -> None: ...

    def stop(self, timeout_s: float) -> None: ...

    def abandon(self) -> None:
        """For an engine whose step hangs: it is not waited for any more. The engine is not `alive` from now on, refuses
        everything with EngineStopped, and ends if the step does. What it was asked before may never be answered."""

    @property
    def alive(self) -> bool: ...

    @property
    def step_age_s(self) -> float:
        """Seconds since the step, or the command, began that is under way; 0 while there is nothing to do."""

    @property
    def max_context_len(self) -> int: ...

    @property
    def pool_len(self) -> int:
        """Tokens that the whole KV pool can hold: no sequence gets longer."""

    @property
    def vocab_size(self) -> int: ...

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request. Raises InvalidRequest, ContextLengthExceeded, RequestTooLarge, EngineOverloaded
        or EngineStopped before anything is changed; afterwards the request always gets a final delta."""

    def abort(self, request_id: str) -> None:
        """Ends the request at the next step with FinishReason.ABORT; unknown ids are ignored."""

    def close_session(self, session_id: str) -> Future[None]:
        """Frees the session's KV. Raises SessionBusy (in the future) while a turn runs. Unknown ids are fine."""

    def rewind_session(self, session_id: str, length: int) -> Future[None]:
        """Frees what the session's KV has past its first `length` tokens. Raises SessionBusy while a turn runs.

        Only for the memory: KV that a turn's history does not have is never used.
        """

    def fork_session(
        self,
        parent_id: str,
        child_id: str,
        history: Sequence[int],
        history_len: int,
        history_chain: TokenChain | None = None,
    ) -> Future[int]:
        """Starts session `child_id` at the first `history_len` tokens of its idle parent, sharing KV pages.

        Gives how many of those tokens have KV now; the child's first turn computes the others. `history` is the
        parent's, with its chain as a request has it, read until the future is done. Raises SessionBusy while the
        parent or the child has a turn.
        """

    def empty_chain(self, namespace: str) -> TokenChain:
        """For a history of this tenant that has no token yet. Whoever keeps the history cuts and extends the chain with
        it, and hands in both: then a turn costs the same at any length."""

    def flush(self) -> Future[bool]:
        """Drops every cached prefix no session holds. False, and nothing done, while requests run."""

    def stats(self) -> EngineStats: ...

    def describe(self) -> dict[str, str | int | float | bool]:
        """What it runs on and how: device, attention and why, graphs; `model_fingerprint` tells models apart. Never
        changes."""

    def session_kv_tokens(self) -> Future[dict[str, int]]:
        """Tokens of KV held per idle session, wherever they are."""

    def kv_census(self) -> Future[KVCensus]:
        """Whose KV is where, and which sessions have any. Looks at all of them."""

    def session_places(self, session_ids: Sequence[str]) -> Future[dict[str, KVPlace]]:
        """Where these sessions' KV is, of those that have any."""

    def audit(self) -> Future[AuditReport]:
        """Walks every page of every pool and names each that has no account, or two, and who had it last."""
