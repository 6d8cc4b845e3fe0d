"""Structured output: what a call asks of its answer, as a constraint that the engine follows."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine.api import ConstraintFailed, InvalidRequest, TokenConstraint
from serving.grammars.grammar_trial import GrammarTrial
from serving.grammars.grammars import GrammarConstraint, Grammars, reason_of
from serving.wire.turns import OutputConstraint

CACHED_GRAMMARS = 32
CACHED_TRIALS = 1024
NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "tool_calls": "functions' parameters"}


class ConstraintCompiler:
    """One for a replica. Grammars are compiled on a thread of its own, one after another, and the latest are kept. Each
    is tried in another process first, which bounds what it may take.

    `tokenizer` is None if the model has none; `vocab_size` is the model's.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        # It alone uses what follows; constraints go to the engine's thread, each for itself.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kedge-grammar")
        self._grammars = Grammars(tokenizer, vocab_size)
        trial = None if tokenizer is None else GrammarTrial(tokenizer, vocab_size)
        self._refusal = lru_cache(maxsize=CACHED_TRIALS)(_nothing if trial is None else trial.refusal)
        self._grammar = lru_cache(maxsize=CACHED_GRAMMARS)(self._compile)

    async def compile(self, constraint: OutputConstraint) -> TokenConstraint:
        """A constraint at its beginning. Raises InvalidRequest, which names the kind."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._begin, constraint)

    def _begin(self, constraint: OutputConstraint) -> GrammarConstraint:
        try:
            try:
                return self._grammars.begin(self._grammar(constraint))
            except ConstraintFailed:
                # Copies share a lexer, and with it the limit of its states: what others did may have filled it.
                self._grammar.cache_clear()
                return self._grammars.begin(self._grammar(constraint))
        except (ValueError, ConstraintFailed) as error:
            reason = f"The {NAMES[constraint.kind]} cannot be enforced: {reason_of(str(error))}"
            raise InvalidRequest(reason, constraint.kind) from error

    def _compile(self, constraint: OutputConstraint) -> LLMatcher:
        refusal = self._refusal(constraint)
        if refusal is not None:
            raise ValueError(refusal)
        return self._grammars.compile(constraint)


def _nothing(_constraint: OutputConstraint) -> None:
    return None
