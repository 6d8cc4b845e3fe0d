"""Picks tokens from logits.

A pick depends only on the item's own logits, parameters, seed and position, never on other items of the batch. Each
draw is one number, a pure function of (seed, position), put through the inverse of the distribution.

Legend: R sampled rows, V vocabulary, C candidates left to draw from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.api import SamplingParams, TokenLogprob
from engine.device import fetch, is_gpu, send, send_bytes
from engine.runner.penalties import Penalties

SEED_MASK = 2**64 - 1
UNIT_53 = 2.0**-53
LEAST_TEMPERATURE = 1e-5
"""Lower temperatures are greedy in effect, and would overflow."""


def is_argmax(params: SamplingParams) -> bool:
    """True if the pick is the argmax of the model's own logits."""
    return params.greedy and not params.edits_logits


def argmax_rows(logits_RV: Tensor) -> list[int]:
    """The most likely token of each row; of equal ones the first."""
    if logits_RV.device.type == "cpu":
        # numpy's is several times quicker; both take the first of equal ones. It does not know bfloat16.
        picks: list[int] = logits_RV.float().numpy().argmax(-1).tolist()
        return picks
    return logits_RV.argmax(-1).tolist()


def uniform(seed: int, position: int) -> float:
    """The one random number in [0, 1) of a request's `seed` and an absolute token position."""
    bits = np.random.Philox(key=seed & SEED_MASK, counter=position).random_raw()
    return float(int(bits) >> 11) * UNIT_53


def log_probabilities(logits_RV: Tensor) -> Tensor:
    """In float32. On a GPU torch sums a row in an order that depends on its first number's address, modulo 16 bytes. So
    rows get a multiple of four numbers; those added have no weight."""
    wide_RV = logits_RV.float()
    added = -wide_RV.shape[1] % 4
    if not added or not is_gpu(wide_RV.device):
        return torch.log_softmax(wide_RV, dim=-1)
    return torch.log_softmax(pad(wide_RV, (0, added), value=-torch.inf), dim=-1)[:, :-added]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """By row, the log-probability of its token, and those of the K most likely tokens with their ids, of the raw model
    distribution."""

    chosen_R: Tensor
    top_RK: Tensor
    ids_RK: Tensor

    @classmethod
    def of(cls, logits_RV: Tensor, tokens_R: Tensor, most: int) -> Scores:
        """Scores with up to `most` likely tokens, computed where the logits are."""
        logprobs_RV = log_probabilities(logits_RV)
        chosen_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
        most = min(most, logprobs_RV.shape[1])
        if not most:
            return cls(chosen_R, logprobs_RV[:, :0], tokens_R[:, None][:, :0])
        ids_RK = most_likely(logprobs_RV, most)
        return cls(chosen_R, logprobs_RV.gather(1, ids_RK), ids_RK)

    def fetched(self) -> Scores:
        """A copy in host memory, complete once the device has passed it."""
        return Scores(fetch(self.chosen_R), fetch(self.top_RK), fetch(self.ids_RK))

    def read(self, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
        """One entry for each row, with its `tops` most likely tokens."""
        chosen, values, ids = self.chosen_R.tolist(), self.top_RK.tolist(), self.ids_RK.tolist()
        return [
            TokenLogprob(token, chosen[row], tuple(zip(ids[row], values[row], strict=True))[: tops[row]])
            for row, token in enumerate(token_ids)
        ]


def most_likely(logprobs_RV: Tensor, most: int) -> Tensor:
    """The ids [R, most] of each row's most likely tokens, of equal ones the smaller first. torch.topk by itself chooses
    among equal values by how many are asked for."""
    if logprobs_RV.device.type == "cpu":  # where the way for equal ones takes several times as long
        values_RK, ids_RK = logprobs_RV.topk(min(most + 1, logprobs_RV.shape[1]), dim=-1)
        if bool((values_RK[:, 1:] < values_RK[:, :-1]).all()):
            return ids_RK[:, :most]
    bits_RV = logprobs_RV.view(torch.int32)
    order_RV = (bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)).long() << 32  # integers ordered as the floats are
    last = logprobs_RV.shape[1] - 1
    order_RV |= torch.arange(last, -1, -1, device=logprobs_RV.device)
    return last - (order_RV.topk(most, dim=-1).values & 0xFFFFFFFF)


def token_logprobs(logits_RV: Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Log-probabilities of the raw model distribution, with each row's `tops` most likely tokens."""
    tokens_R = torch.tensor(token_ids, dtype=torch.int64, device=logits_RV.device)
    return Scores.of(logits_RV, tokens_R, max(tops)).read(token_ids, tops)


def allowed_rows(logits_RV: Tensor, masks: Mapping[int, bytes]) -> Tensor:
    """The logits, with -inf in the rows of `masks` for every token whose bit is not set (see SampleSpec.allowed). A
    copy, unless there are no masks."""
    if not masks:
        return logits_RV
    device = logits_RV.device
    # A step's masks go to the device in one piece, eight tokens to a byte.
    bits_MB = send_bytes(b"".join(masks.values()), device).view(len(masks), -1)
    allowed_MV = (bits_MB[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1).flatten(1)
    rows_M = send([*masks], torch.int64, device)
    kept_MV = logits_RV[rows_M].masked_fill(allowed_MV[:, : logits_RV.shape[1]] == 0, float("-inf"))
    return logits_RV.index_copy(0, rows_M, kept_MV)


def sample_row(logits_V: Tensor, params: SamplingParams, position: int, penalties: Penalties | None) -> int:
    """The token for absolute position `position`, after the tokens that `penalties` knows. `logits_V` stays
    unchanged."""
    logits_V = logits_V.float()
    if params.edits_logits:
        logits_V = edit_logits(logits_V, params, penalties)
    if params.greedy:
        return int(logits_V.argmax())
    probs_C, ids_C = candidates(logits_V, params)
    pick = inverse_cdf(probs_C, uniform(params.seed, position))
    return pick if ids_C is None else int(ids_C[pick])


def inverse_cdf(probs_C: Tensor, point: float) -> int:
    """The first index whose cumulative mass exceeds `point` of the whole mass."""
    cumulative_C = probs_C.cumsum(0, dtype=torch.float64)
    index = int(torch.searchsorted(cumulative_C, point * float(cumulative_C[-1]), right=True))
    if index >= len(probs_C):  # rounding, once in 2 ** 53
        return int(probs_C.argmax())
    return index


def edit_logits(logits_V: Tensor, params: SamplingParams, penalties: Penalties | None) -> Tensor:
    """A copy with repetition, frequency and presence penalties and the bias applied, in this order."""
    edited_V = logits_V.clone() if penalties is None else penalties.apply(logits_V)
    add_bias(edited_V, params)
    return edited_V


def add_bias(logits_V: Tensor, params: SamplingParams) -> None:
    """Adds the bias in place."""
    if params.logit_bias:
        ids = send([*params.logit_bias.keys()], torch.int64, logits_V.device)
        logits_V[ids] += send([*params.logit_bias.values()], torch.float32, logits_V.device)


def candidates(logits_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """What to draw from after temperature, top-k, top-p and min-p, in this order.

    Returns masses [C], not renormalised, and their token ids [C], ascending; None for the ids means all tokens. All
    tokens as likely as the k-th stay.
    """
    # The largest becomes zero, so that cold temperatures cannot overflow.
    scaled_C, ids_C = (logits_V - logits_V.max()) / max(params.temperature, LEAST_TEMPERATURE), None
    if 0 < params.top_k < len(logits_V):
        least = scaled_C.topk(params.top_k, sorted=False).values.min()
        ids_C = (~(scaled_C < least)).nonzero()[:, 0]  # NaN stays as well, or nothing would be left
        scaled_C = scaled_C[ids_C]
    probs_C = torch.softmax(scaled_C, dim=0)
    if params.top_p < 1.0:
        probs_C = probs_C.masked_fill(probs_C < _nucleus_floor(probs_C, params.top_p), 0.0)
    if params.min_p > 0.0:
        probs_C = probs_C.masked_fill(probs_C < params.min_p * probs_C.max(), 0.0)
    return probs_C, ids_C


def _nucleus_floor(probs_C: Tensor, top_p: float) -> float:
    """The least mass that stays: a token stays if the more likely ones together have less than `top_p`. Equal masses
    stay or go together, and the most likely token always stays."""
    ascending_C = _sorted(probs_C)
    upto_C = ascending_C.cumsum(0, dtype=torch.float64)
    first = int(torch.searchsorted(upto_C, float(upto_C[-1]) * (1.0 - top_p), right=True))
    return float(ascending_C[min(first, len(probs_C) - 1)])


def _sorted(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy()))  # many times quicker than torch's
    return values.sort().values
