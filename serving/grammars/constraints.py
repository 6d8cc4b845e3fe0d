"""Structured output: turns what a request demands of its answer into a constraint that the engine follows."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenizers import Tokenizer

from engine.api import ConstraintFailed, InvalidRequest, TokenConstraint
from serving.grammars.fair_queue import FairQueue
from serving.grammars.grammar_constraint import CompiledGrammar, reason_of
from serving.grammars.grammar_trial import GrammarTrial
from serving.grammars.grammars import Grammars
from serving.grammars.strict_calls import StrictCalls, StrictCallsConstraint
from serving.wire.turns import OutputConstraint

CACHED_GRAMMARS = 32
CACHED_TRIALS = 1024
MOST_WAITING = 64
MOST_WAITING_OF_TENANT = 16
NAMES = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "tool_calls": "functions' parameters",
    "grammar": "grammar",
    "strict_calls": "parameters of a strict function",
}

K = TypeVar("K")
T = TypeVar("T")


class ConstraintCompiler:
    """Each replica has one; its tables are used on the event loop only. The latest grammars are kept. A new grammar is
    first tried in another process, which bounds what it may take. Then it is compiled on a thread, one at a time, with
    tenants taking turns. A request for a kept grammar waits for one compilation at most. One that is worn is not kept.

    `tokenizer` is None if the model has none; `vocab_size` is the model's.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        # Only this thread uses the grammars. Each constraint goes to the engine's thread by itself.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kedge-grammar")
        self._trial_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kedge-grammar-trial")
        self._grammars = Grammars(tokenizer, vocab_size)
        self._trial = None if tokenizer is None else GrammarTrial(tokenizer, vocab_size)
        self._queue = FairQueue("new grammars", most=MOST_WAITING, most_of_tenant=MOST_WAITING_OF_TENANT)
        self._refusals: OrderedDict[bytes, str | None] = OrderedDict()
        """By digest: with 1024 grammars of the longest it would have 64 to 256 MiB."""
        self._compiled: OrderedDict[OutputConstraint, CompiledGrammar | StrictCalls] = OrderedDict()

    async def compile(self, constraint: OutputConstraint, tenant: str = "") -> TokenConstraint:
        """A new constraint, before its first token. Raises InvalidRequest, which names the kind, and
        EngineOverloaded."""
        try:
            grammar = await self._grammar(constraint, tenant)
            try:
                return await _on(self._thread, self._grammars.begin, grammar)
            except ConstraintFailed:
                # Copies share a lexer, and with it the limit of its states: other copies may have filled it.
                self._compiled.clear()
                grammar = await self._grammar(constraint, tenant)
                return await _on(self._thread, self._grammars.begin, grammar)
        except (ValueError, ConstraintFailed) as error:
            reason = f"The {NAMES[constraint.kind]} cannot be enforced: {reason_of(str(error))}"
            raise InvalidRequest(reason, constraint.kind) from error

    async def strict_calls(self, source: str, tenant: str = "") -> StrictCallsConstraint | None:
        """A constraint for a free answer that may contain calls. None if it would take too much and no function in it
        must be enforced. Raises like `compile`."""
        try:
            constraint = await self.compile(OutputConstraint("strict_calls", source), tenant)
        except InvalidRequest:
            if any(function["must"] for function in json.loads(source)["functions"]):
                raise
            return None
        assert isinstance(constraint, StrictCallsConstraint)
        return constraint

    async def _grammar(self, constraint: OutputConstraint, tenant: str) -> CompiledGrammar | StrictCalls:
        """Raises ValueError for a grammar that cannot be compiled."""
        for worn in [kept for kept, grammar in self._compiled.items() if grammar.worn]:
            del self._compiled[worn]
        if constraint not in self._compiled:
            async with self._queue.place(tenant):
                if constraint not in self._compiled:  # another call may have asked for the same
                    _keep(self._compiled, constraint, await self._make(constraint), CACHED_GRAMMARS)
                return self._compiled[constraint]
        self._compiled.move_to_end(constraint)
        return self._compiled[constraint]

    async def _make(self, constraint: OutputConstraint) -> CompiledGrammar | StrictCalls:
        digest = _digest(constraint)
        if self._trial is not None and digest not in self._refusals:
            refusal = await _on(self._trial_thread, self._trial.refusal, constraint)
            _keep(self._refusals, digest, refusal, CACHED_TRIALS)
        if (refusal := self._refusals.get(digest)) is not None:
            raise ValueError(refusal)
        return await _on(self._thread, self._grammars.compile, constraint)


def _digest(constraint: OutputConstraint) -> bytes:
    text = f"{constraint.kind} {constraint.source}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _keep(latest: OrderedDict[K, T], key: K, value: T, most: int) -> None:
    latest[key] = value
    if len(latest) > most:
        latest.popitem(last=False)


async def _on(thread: ThreadPoolExecutor, work: Callable[..., T], *args: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, work, *args)
