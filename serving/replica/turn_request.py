"""Turns a protocol's TurnCall into the engine's GenerateRequest: tokenizes text, fills in defaults, applies limits."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

from cache.token_chain import TokenChain
from controllers.errors import CapacityExceeded, ModelChanged
from controllers.session_keys import named
from controllers.turns import Fork, Turn
from engine.api import (
    AdapterNotLoaded,
    Engine,
    EngineOverloaded,
    GenerateRequest,
    SamplingParams,
    TokenConstraint,
)
from serving.grammars.constraints import ConstraintCompiler
from serving.grammars.strict_calls import StrictCallsConstraint
from serving.replica.prompt_places import PlacedPrompt, PromptPlacer
from serving.replica.request_digest import request_digest
from serving.text.output_text import OutputText
from serving.text.reasoning.formats import OPENER_TOKENS
from serving.text.text import TextProcessor
from serving.wire.turns import (
    ChatPrompt,
    Prompt,
    ServiceError,
    TextPrompt,
    TokenizedPrompt,
    TokenPrompt,
    TurnCall,
)
from serving.wire.versions import mismatch

LONG_PROMPT = 20_000
"""In characters, plus VALUE_WEIGHT for each value in the prompt. Longer prompts are rendered, tokenized and hashed on a
thread, so that the event loop keeps serving others."""
VALUE_WEIGHT = 16
LONG_PROMPT_THREADS = 2
LONG_PROMPT_TIMEOUT_S = 30.0
SEED_LIMIT = 2**63

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BuiltRequest:
    """A request, and the text of its output. `in_thought`: the prompt ends within a thought, which the output goes on
    with."""

    request: GenerateRequest
    output: OutputText
    in_thought: bool


class RequestBuilder:
    """Builds requests. Safe to use for any number of calls at once."""

    def __init__(
        self,
        engine: Engine,
        text: TextProcessor,
        constraints: ConstraintCompiler,
        *,
        long_prompt_timeout_s: float = LONG_PROMPT_TIMEOUT_S,
    ) -> None:
        self._engine = engine
        self._text = text
        self._long_prompts = ThreadPoolExecutor(LONG_PROMPT_THREADS, thread_name_prefix="long-prompt")
        self._long_prompt_timeout_s = long_prompt_timeout_s
        self._placer = PromptPlacer(text)
        self._constraints = constraints

    async def constraint(self, call: TurnCall) -> TokenConstraint | None:
        """The constraint, in its initial state, on the call's whole output or on the function calls in it. None: there
        is none. Raises InvalidRequest."""
        if call.constraint is not None:
            return await self._constraints.compile(call.constraint, call.tenant)
        if call.strict_calls is not None:
            return await self._constraints.strict_calls(call.strict_calls, call.tenant)
        return None

    def check(self, call: TurnCall) -> None:
        """Raises ServiceError if the front end's version is too far from this one, and AdapterNotLoaded for a call
        without a session: the front end may have newer settings. A session may have the answer already; if not, its
        chain cannot be made."""
        if (refusal := mismatch(call.wire_version)) is not None:
            raise ServiceError(refusal)
        lacks = call.adapter and call.adapter not in self._engine.adapters
        if lacks and call.session is None:
            raise AdapterNotLoaded(f"the adapter {call.adapter!r} is not loaded", param="model")

    async def place(self, call: TurnCall, turn: Turn | None) -> PlacedPrompt:
        """The call's tokens, and how much of the turn's history they follow. Raises InvalidRequest,
        ContextLengthExceeded, HistoryDiffers, AmbiguousHistory, ModelChanged and EngineOverloaded."""
        if call.resumed is not None and call.resumed.tokenizer not in (None, self._text.tokenizer_hash):
            raise ModelChanged(
                "The replica that answered was lost, and the model served now has another tokenizer: the answer cannot "
                "be gone on with. Send the turn again.",
                None,
            )
        unknown = self._placer.unknown_part(call, turn)
        if turn is not None and unknown is not None and not _is_long(unknown):
            placed = self._placer.place_behind(call, turn)
            if placed is not None:
                return placed
        return await self._of_prompt(call.prompt, partial(self._placer.place, call, turn))

    def build(
        self,
        call: TurnCall,
        turn: Turn | None,
        prompt: PlacedPrompt,
        engine_id: str,
        constraint: TokenConstraint | None,
        on_admitted: Callable[[], None] | None,
    ) -> BuiltRequest:
        """Builds the engine's request. `constraint` belongs to this call alone. `on_admitted` as in GenerateRequest. An
        unnamed session keeps its KV in the engine from its second turn on only, since most have a single turn. Raises
        InvalidRequest and CapacityExceeded."""
        end = _end_of(turn, prompt)
        output, in_thought = self._output_text(call, end), self._text.opens_thought(end)
        if in_thought and isinstance(constraint, StrictCallsConstraint):
            constraint.begin_in_thought()
        history_len = 0 if turn is None else turn.history_len
        keeps_kv = turn is not None and (call.session is not None or turn.turn_index > 0)
        request = GenerateRequest(
            request_id=engine_id,
            new_tokens=prompt.new_tokens,
            sampling=self._sampling(call, turn, history_len + len(prompt.new_tokens)),
            history=() if turn is None else turn.history,
            history_len=history_len,
            history_chain=history_chain(turn),
            session_id=turn.session_id if turn is not None and keeps_kv else None,
            namespace=_namespace(call),
            adapter=call.adapter,
            priority=call.priority,
            logprobs=call.logprobs,
            watcher=output.watcher,
            constraint=constraint,
            resumed_tokens=() if call.resumed is None else call.resumed.token_ids,
            on_admitted=on_admitted,
        )
        return BuiltRequest(request, output, in_thought)

    def _output_text(self, call: TurnCall, end: Sequence[int]) -> OutputText:
        """The text of the call's output, which is fed token by token. An answer in a chat is a text of its own; other
        outputs continue the prompt's text, which has `end`. Raises InvalidRequest."""
        is_answer = isinstance(call.prompt, ChatPrompt) and not call.prompt.continues_final
        return self._text.output_text(
            call.stop,
            trim_stop=call.trim_stop,
            skip_special_tokens=call.skip_special_tokens,
            shown=call.shown_tokens,
            min_tokens=call.sampling.min_new_tokens,
            before=() if is_answer else end,
        )

    async def tokenize(
        self, prompt: ChatPrompt | TextPrompt, add_special_tokens: bool, *, with_token_strs: bool
    ) -> TokenizedPrompt:
        """The tokens of a prompt outside a session. Raises InvalidRequest, ContextLengthExceeded and
        EngineOverloaded."""

        def work() -> TokenizedPrompt:
            token_ids = self._text.tokenize(prompt, add_special_tokens=add_special_tokens)
            strs = self._text.token_strs(token_ids) if with_token_strs else ()
            return TokenizedPrompt(tuple(token_ids), strs)

        return await self._of_prompt(prompt, work)

    async def detokenize(self, token_ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        """The text of tokens. Raises InvalidRequest and EngineOverloaded."""
        work = partial(self._text.detokenize, token_ids, skip_special_tokens=skip_special_tokens)
        return await self._of_prompt(TokenPrompt(token_ids), work)

    async def digests(self, call: TurnCall) -> tuple[str, str | None]:
        """A digest that tells apart different requests with the same idempotency key, and one of the call's tools that
        does not depend on their order: None if the call names none. Raises EngineOverloaded."""
        return await self._of_prompt(call.prompt, lambda: (request_digest(call), _tools_digest(call.prompt)))

    async def _of_prompt(self, prompt: Prompt, work: Callable[[], T]) -> T:
        """The result of `work`, which runs on a thread if the prompt is long. Raises EngineOverloaded when that takes
        too long, waiting for a free thread included. A thread that is at work then still finishes."""
        if not _is_long(prompt):
            return work()
        try:
            async with asyncio.timeout(self._long_prompt_timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._long_prompts, work)
        except TimeoutError:
            message = f"The prompt was not made into tokens within {self._long_prompt_timeout_s:g} s; try again later."
            raise EngineOverloaded(message) from None

    def _sampling(self, call: TurnCall, turn: Turn | None, prompt_len: int) -> SamplingParams:
        room = max(0, self._engine.max_context_len - prompt_len)
        if turn is not None and turn.room_tokens is not None:
            capacity_room = turn.history_len + turn.room_tokens - prompt_len
            if capacity_room < 1:
                raise CapacityExceeded(
                    f"{named(turn.session_id)} has room for {turn.room_tokens} more tokens; the turn needs more"
                )
            room = min(room, capacity_room)
        asked = call.max_new_tokens
        if asked is None:
            # A client that asks for no length must not be refused because the KV pool is too small.
            asked = max(0, self._engine.pool_len - prompt_len)
        return replace(
            call.sampling,
            bad_words=self._text.bad_words(call.bad_words),
            max_new_tokens=min(asked, room),
            seed=secrets.randbelow(SEED_LIMIT) if call.seed is None else call.seed,
        )


def history_chain(lent: Turn | Fork | None) -> TokenChain | None:
    """The engine's token chain, which the SessionController keeps along with the history."""
    return None if lent is None else cast("TokenChain | None", lent.chain)


def _end_of(turn: Turn | None, prompt: PlacedPrompt) -> list[int]:
    """The last tokens that the model reads before its output."""
    known = () if turn is None else turn.history[max(0, prompt.kept_len - OPENER_TOKENS) : prompt.kept_len]
    return [*known, *prompt.new_tokens[-OPENER_TOKENS:]]


def _namespace(call: TurnCall) -> str:
    """The namespace whose prefixes the call may share. No tenant's name has a NUL, so no salt leads to another
    tenant."""
    return f"{call.tenant}\0{call.cache_salt}" if call.cache_salt else call.tenant


def _is_long(prompt: Prompt) -> bool:
    """Whether the prompt is long. Looks at no more of it than needed. A prompt with its own template counts as long,
    since that may take any time."""
    if isinstance(prompt, ChatPrompt) and prompt.template is not None:
        return True
    room = LONG_PROMPT
    rest: list[Any] = []
    match prompt:
        case TextPrompt():
            rest = [prompt.text]
        case ChatPrompt():
            rest = [prompt.messages, prompt.tools, prompt.template_kwargs]
        case TokenPrompt():
            room -= len(prompt.token_ids)
    while rest and room >= 0:
        value = rest.pop()
        room -= VALUE_WEIGHT
        if isinstance(value, str):
            room -= len(value)
        elif isinstance(value, list | tuple):
            rest.extend(islice(value, LONG_PROMPT // VALUE_WEIGHT))
        elif isinstance(value, Mapping):
            rest.extend(islice(value.items(), LONG_PROMPT // VALUE_WEIGHT))
    return room < 0


def _tools_digest(prompt: Prompt) -> str | None:
    if not isinstance(prompt, ChatPrompt) or not prompt.tools:
        return None
    return hashlib.sha256("\n".join(sorted(map(_canonical, prompt.tools))).encode()).hexdigest()


def _canonical(tool: Mapping[str, Any]) -> str:
    return json.dumps(tool, sort_keys=True)
