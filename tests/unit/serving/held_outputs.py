"""Outputs that are held to a grammar: the tokens that it allows, and random walks through these without a model.

Grammars are compiled here at once, without the process that tries them first: it takes half a second to start."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
from transformers import PreTrainedTokenizerFast

from engine.api import TokenConstraint
from serving.grammars.grammars import Grammars
from serving.text.tool_calls.formats import FormatName
from serving.wire.turns import OutputConstraint


def grammars_of(tokenizer: PreTrainedTokenizerFast) -> Grammars:
    """For a model whose vocabulary is the tokenizer's."""
    return Grammars(tokenizer.backend_tokenizer, len(tokenizer))


def held_to_calls(
    grammars: Grammars, name: FormatName, functions: dict[str, object], *, parallel: bool = True
) -> TokenConstraint:
    """A constraint to calls of these functions, which are given by their parameters. Raises ValueError."""
    told = [{"name": key, "parameters": parameters} for key, parameters in functions.items()]
    source = {"format": name, "functions": told, "parallel": parallel, "answer": None}
    return grammars.begin(grammars.compile(OutputConstraint("tool_calls", json.dumps(source))))


def allowed_ids(held: TokenConstraint) -> list[int]:
    bits = np.unpackbits(np.frombuffer(held.allowed(), dtype=np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def takes(held: TokenConstraint, token_ids: Iterable[int]) -> bool:
    """Whether the output may begin with these tokens, which it then does."""
    for token_id in token_ids:
        if token_id not in allowed_ids(held):
            return False
        held.accept(token_id)
    return True


def any_output(held: TokenConstraint, seed: int, most: int = 10_000) -> list[int]:
    """A random output that is allowed. It goes on with even chances where it may end, and has `most` tokens at most."""
    chance, out = np.random.default_rng(seed), list[int]()
    while not held.complete and not (held.may_end and chance.random() < 0.5) and len(out) < most:
        out.append(int(chance.choice(allowed_ids(held))))
        held.accept(out[-1])
    return out
