"""Verification: how many of an item's drafts the model agrees with, and the token it picks where it does not.

Every token is picked at its own row by the rule that applies without drafts: argmax, or the inverse of the row's
distribution at the one number of (seed, position), with the penalties for the tokens before it. A draft is kept if it
equals that pick. The first pick that differs, or the one after the last draft, ends the item's step.

So a draft changes when a token is computed, and never which one: a pick does not depend on what the draft proposes. It
is also rejection sampling (Leviathan et al. 2023, Chen et al. 2023). For a proposal q that puts all its mass on one
token x they accept x with probability min(1, p(x) / q(x)) = p(x), and else draw from the rest, norm(max(0, p - q)),
which is p without x. Here the pick is distributed as p; it equals x with probability p(x), and given that it does not,
it is distributed as p without x. The draw and the acceptance use one random number instead of two.

Legend: R rows of logits, those of an item one after another (sample_rows in inputs.py); V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from engine.api import TokenLogprob
from engine.batch import BatchItem, ItemOutput
from engine.runner.penalties import PenaltyTable
from engine.runner.sampler import allowed_rows, argmax_rows, is_argmax, sample_row, token_logprobs


def choose_tokens(logits_RV: Tensor, items: Sequence[BatchItem], penalties: PenaltyTable) -> list[ItemOutput]:
    """Accepted tokens of each item, in order. All items sample; each has 1 + num_drafts rows in `logits_RV`."""
    plain = [item.sample is not None and is_argmax(item.sample.params) for item in items]
    firsts = list(accumulate((1 + item.num_drafts for item in items[:-1]), initial=0))
    allowed_RV = allowed_rows(logits_RV, masks_of(items))
    picks_R = argmax_rows(allowed_RV) if any(plain) else []
    outputs = []
    for item, is_plain, row in zip(items, plain, firsts, strict=True):
        tokens = agreed(item, picks_R, row) if is_plain else _sampled(item, allowed_RV, row, penalties)
        outputs.append(ItemOutput(tokens, num_proposed=item.num_drafts))
    add_logprobs(logits_RV, items, firsts, outputs)
    return outputs


def masks_of(items: Sequence[BatchItem]) -> dict[int, bytes]:
    """The masks of a step, by row. Items that do not sample have no row."""
    masks: dict[int, bytes] = {}
    row = 0
    for item in items:
        if item.sample is None:
            continue
        if item.sample.allowed is not None:
            assert item.num_drafts == 0, f"{item.request_id}: drafts of a constrained request"
            masks[row] = item.sample.allowed
        row += 1 + item.num_drafts
    return masks


def _drafts(item: BatchItem) -> Sequence[int]:
    return item.token_ids[len(item.token_ids) - item.num_drafts :]


def agreed(item: BatchItem, picks_R: Sequence[int], first: int) -> tuple[int, ...]:
    """The picks that an item accepts; its rows begin at `first`."""
    if item.num_drafts == 0:
        return (picks_R[first],)
    kept = 0
    for draft in _drafts(item):
        if draft != picks_R[first + kept]:
            break
        kept += 1
    return tuple(picks_R[first : first + kept + 1])


def _sampled(item: BatchItem, logits_RV: Tensor, first: int, table: PenaltyTable) -> tuple[int, ...]:
    """Picks row by row, so that each pick sees the penalties of those before it. Rows after the end are not read."""
    spec = item.sample
    assert spec is not None
    penalties = table.of(spec, logits_RV[first])
    if penalties is not None and item.num_drafts:  # the run's own must not change
        penalties = penalties.copy()
    tokens: list[int] = []
    for draft in (*_drafts(item), None):
        count = len(tokens)
        token = sample_row(logits_RV[first + count], spec.params, item.certain_len + count, penalties)
        tokens.append(token)
        if token != draft:
            break
        if penalties is not None:
            penalties.add([token])
    return tuple(tokens)


def add_logprobs(
    logits_RV: Tensor, items: Sequence[BatchItem], firsts: list[int], outputs: list[ItemOutput]
) -> None:
    """Scores every accepted token of the items that ask for it, all at once."""
    rows: list[int] = []
    tokens: list[int] = []
    tops: list[int] = []
    scored = [index for index, item in enumerate(items) if item.sample is not None and item.sample.logprobs]
    for index in scored:
        spec, accepted = items[index].sample, outputs[index].token_ids
        assert spec is not None
        rows.extend(range(firsts[index], firsts[index] + len(accepted)))
        tokens.extend(accepted)
        tops.extend([spec.top_logprobs] * len(accepted))
    if not rows:
        return
    values: list[TokenLogprob] = token_logprobs(logits_RV[rows], tokens, tops)
    begin = 0
    for index in scored:
        end = begin + len(outputs[index].token_ids)
        outputs[index].logprobs = tuple(values[begin:end])
        begin = end
