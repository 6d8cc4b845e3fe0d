"""The engine's public interface: requests in, deltas out, typed errors. Plain data, no tensors.

`GenerateRequest` describes one generation. A session's turn passes its committed history by reference (never copied)
and only the turn's new tokens.
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
ADAPTER_MARK = "\1"
"""Inside the engine it ends an adapter's fingerprint, which namespaces of KV begin with."""


class EngineError(Exception):
    """Base of all errors that the engine answers a request with.

    `code` is stable and machine readable; `param` names the request field at fault, if there is one.
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


class AdapterNotLoaded(EngineError):
    """The engine has no adapter of that name. An engine with other settings may have it."""

    code = "adapter_not_loaded"


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


MAX_TEMPERATURE = 1e4
MIN_REPETITION_PENALTY = 0.01
"""Much smaller values are 0 in float32. Then the minus infinity of a forbidden token becomes NaN, and token 0 is drawn.
"""
MAX_REPETITION_PENALTY = 100.0
MAX_ADDITIVE_PENALTY = 2.0
"""Largest frequency or presence penalty, of either sign."""
MAX_LOGIT_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens. `temperature == 0` is greedy; `top_k == 0`, `top_p == 1`, `min_p == 0` are off.

    Neither end-of-sequence tokens nor `stop_token_ids` are picked before `min_new_tokens` of output. Only
    `allowed_token_ids` are ever picked (None: all tokens). A token that would complete one of `bad_words` in the output
    is never picked.
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
        """True if logits are changed before the pick, so that plain argmax of the model's logits is not enough."""
        return self.penalizes or bool(self.logit_bias)

    @property
    def penalizes(self) -> bool:
        """True if the change of logits depends on the tokens so far."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True)
class LogprobParams:
    """Which log-probabilities (of the raw model distribution, natural log) to report.

    `input_start` is an absolute position in history + new tokens. Each token from there on gets an entry. KV of the
    history past it is computed again for its logits.
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
    """Follows a request's output text on the engine's thread to find stop strings. It sees every accepted token once,
    in order, before the delta with that token is sent. It does not see the request's stop tokens, which end the request
    anyway."""

    def accept(self, token_id: int) -> str | None:
        """The stop string that the text completes with this token; None if there is none."""


class TokenConstraint(Protocol):
    """Decides token by token what a request may generate. Used on the engine's thread, which reads it after each
    `accept`.

    It decides about text alone. The engine handles the model's end-of-sequence tokens and allows them where the output
    `may_end`. Any exception that it raises ends its request; ConstraintFailed says why. Only `holds` may not raise.

    It may constrain only parts of an output. Where they begin and end follows from the tokens so far, however they were
    picked. The token that begins such a part is not constrained.
    """

    @property
    def holds(self) -> bool:
        """Whether it restricts the next token. If not, any token may be next, and only `accept` and `complete` are
        called."""

    @property
    def may_end(self) -> bool:
        """Whether the output so far is complete."""

    @property
    def complete(self) -> bool:
        """Whether the output is complete and nothing may follow."""

    def allowed(self) -> bytes:
        """A bit for each token of the model, the least significant first, in whole bytes: whether the token may be
        next."""

    def accept(self, token_id: int) -> None:
        """Takes the next token. If the constraint `holds`, the token was allowed."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """One generation. The model sees `history[:history_len]` followed by `new_tokens`.

    Ownership: the engine's thread reads `history` until the final delta; its owner must not change the first
    `history_len` entries before that. A request with `session_id` continues (or starts) that session's KV, as far as
    that is KV of this history. `history_chain` begins with the same tokens (see Engine.empty_chain) and is lent in the
    same way; without it the engine hashes the history itself.

    `resumed_tokens` are output that another engine generated. They count as this request's output, and it continues
    after them. The first delta repeats them. Log-probabilities are not computed for them, nor for the input of such a
    request.

    Requests of the same `namespace` and `adapter` may use each other's KV. `adapter` is the name of one of the engine's
    `adapters`; "" is none. No namespace has ADAPTER_MARK before its first NUL.

    `on_admitted` is called on the engine's thread each time the request begins to run, before its first step.
    """

    request_id: str
    new_tokens: Sequence[int]
    sampling: SamplingParams
    history: Sequence[int] = ()
    history_len: int = 0
    history_chain: TokenChain | None = None
    session_id: str | None = None
    namespace: str = ""
    adapter: str = ""
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
    """How a request ended. `matched` is the stop token id or stop string; `error` is set for ERROR, and only then."""

    reason: FinishReason
    matched: int | str | None = None
    error: EngineError | None = None


@dataclass(slots=True)
class TokenDelta:
    """Progress of one request since its last delta. Never changed after it is made. (It is not a frozen dataclass
    because that takes ten times as long to make, and every token has one.) Token ids are new since the last delta;
    counts are totals so far.

    `prompt_tokens` counts history and new tokens, `cached_tokens` the part whose KV was already there. `draft_tokens`
    counts proposals so far, `accepted_draft_tokens` those that the model agreed with. `queued_s` is how long the
    request waited for its first step. The last delta of a request, and only that one, carries `finish`.
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
    """Whose KV is where: `num_bytes` by namespace and tier (device, host, disk), without pages of shared prefixes.
    `sessions` are those that have a slot."""

    num_bytes: Mapping[tuple[str, str], int]
    sessions: frozenset[str]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot published by the step loop; safe to read from any thread.

    `window_pages` are the accounts of the pool of sliding-window layers, if the model has any; `window_len` is in
    tokens. `kv_utilization` is what turns use and lack of the pools, as a share of them; above 1 there is not enough
    for all. Demotions are of idle sessions: to host memory, from there to disk, or dropped to the session log.
    `disk_failures` counts failed writes to disk, after which the session stays in host memory, and failed reads.
    Evicted pages, of each pool, are cached ones that were dropped to make room.
    Everything from `steps` on counts since start.
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
    evicted_window_pages: int
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
        """Gives up an engine whose step hangs, without waiting for it. From now on it is not `alive` and refuses
        everything with EngineStopped. It ends if the step ever does. Earlier calls may never be answered."""

    @property
    def alive(self) -> bool: ...

    @property
    def step_age_s(self) -> float:
        """Seconds since the current step or command began; 0 while there is nothing to do."""

    @property
    def max_context_len(self) -> int: ...

    @property
    def pool_len(self) -> int:
        """Tokens that the whole KV pool can hold; no sequence can be longer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """The fingerprints of the adapters that requests may name."""

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request. Raises InvalidRequest, ContextLengthExceeded, RequestTooLarge, AdapterNotLoaded,
        EngineOverloaded or EngineStopped before anything is changed; afterwards the request always gets a final
        delta."""

    def abort(self, request_id: str) -> None:
        """Ends the request at the next step with FinishReason.ABORT; unknown ids are ignored."""

    def close_session(self, session_id: str) -> Future[None]:
        """Frees the session's KV. Raises SessionBusy (in the future) while a turn runs. Unknown ids are fine."""

    def rewind_session(self, session_id: str, length: int) -> Future[None]:
        """Frees the session's KV past its first `length` tokens. Raises SessionBusy while a turn runs.

        Only saves memory: KV that does not belong to a turn's history is never used.
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

        Returns how many of those tokens have KV now; the child's first turn computes the others. `history` and
        `history_chain` are the parent's, as in a GenerateRequest, and are read until the future is done. Raises
        SessionBusy while the parent or the child has a turn.
        """

    def empty_chain(self, namespace: str, adapter: str = "") -> TokenChain:
        """A chain for a history that has no token yet, to be computed in this namespace with this adapter. The owner of
        the history extends and cuts the chain along with it and passes both. A turn then costs the same however long
        the history is. Raises AdapterNotLoaded."""

    def flush(self) -> Future[bool]:
        """Drops every cached prefix that no session holds. False, and nothing is done, while requests run."""

    def stats(self) -> EngineStats: ...

    def describe(self) -> dict[str, str | int | float | bool]:
        """What the engine runs on and how: device, attention and why it was chosen, graphs. `model_fingerprint` tells
        models apart. Never changes."""

    def session_kv_tokens(self) -> Future[dict[str, int]]:
        """Tokens of KV of each idle session, in whatever tier."""

    def kv_census(self) -> Future[KVCensus]:
        """Whose KV is where, and which sessions have any. Walks over all sessions."""

    def session_places(self, session_ids: Sequence[str]) -> Future[dict[str, KVPlace]]:
        """Where the KV of these sessions is. Sessions without KV are left out."""

    def audit(self) -> Future[AuditReport]:
        """Checks every page of every pool. Names each page that has no account or several, and who had it last."""
