"""Tokens ordered by likelihood, as integer keys, and where in this order a mass is reached: device functions.

A token's gap is the row's largest logit less its own, in float32. Gaps are not negative, so their bits, read as
integers (keys), have the same order. All loops end, whatever the logits and parameters are, because they narrow a range
of keys.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

HIGHEST = tl.constexpr(2.0**100)
"""Stands for infinity; divided by the least temperature it is still a finite number."""
HIGHEST_KEY = tl.constexpr(227 << 23)


@triton.jit
def finite(logits):
    """The logits as float32; NaN becomes -inf, and +inf becomes HIGHEST."""
    wide = logits.to(tl.float32)
    return tl.minimum(tl.where(wide == wide, wide, float("-inf")), HIGHEST)


@triton.jit
def gap_below(peak, logits):
    """The gaps of the tokens; HIGHEST for tokens that cannot be picked."""
    return tl.minimum(tl.maximum(peak, -HIGHEST) - logits, HIGHEST)


@triton.jit
def mass_of(gap, cold):
    """Masses, not normalised: the most likely token has 1. `cold` is log2(e) / temperature; with 0 this counts
    tokens."""
    return tl.where(gap < HIGHEST, tl.exp2(-gap * cold), 0.0)


@triton.jit
def key_of(gap):
    return gap.to(tl.int32, bitcast=True)


@triton.jit
def least_key(keys, masses, target, low, high):
    """The least key up to which `masses` sum to `target` or more; it lies in (low, high]."""
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = tl.sum(tl.where(keys <= middle, masses, 0.0)) >= target
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle)
    return high


@triton.jit
def least_key_of_row(
    row_V,
    vocab_size,
    peak,
    cold,
    target,
    slack,
    low,
    high,
    upto_low,
    upto_high,
    BLOCK: tl.constexpr,
):
    """least_key over a whole row in memory: at most about forty passes, on random rows of 128 k seven or eight.

    `upto_low` is the mass up to `low`, `upto_high` at least the mass up to `high`. The search may end when at most
    `slack` of mass is left between them. Every other pass tries pivots close to where the target would lie if masses
    were even. `high` becomes the key of a token, and the last pivot of a pass is the key before it, so a value that
    many tokens share is recognised at once.
    """
    columns = tl.arange(0, BLOCK)
    passes = low * 0
    while (high - low > 1) & (upto_high - upto_low > slack) & (upto_high > target):
        span = high - low
        share = tl.minimum(tl.maximum((target - upto_low) / (upto_high - upto_low), 0.0), 1.0)
        guess = low + (share * span.to(tl.float32) * 0.9999).to(tl.int32)
        guesses = passes % 2 == 1
        first = tl.where(guesses, guess - span // 16 - 1, low + span // 3)
        second = tl.where(guesses, guess + span // 16 + 1, high - span // 3)
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, low + 1), high - 1)
        third = high - 1
        upto_first = tl.zeros([BLOCK], tl.float32)
        upto_second = tl.zeros([BLOCK], tl.float32)
        upto_third = tl.zeros([BLOCK], tl.float32)
        last_first = tl.zeros([BLOCK], tl.int32)
        last_second = tl.zeros([BLOCK], tl.int32)
        last_third = tl.zeros([BLOCK], tl.int32)
        for start in tl.range(0, vocab_size, BLOCK, num_stages=3):
            tokens = start + columns
            gap = gap_below(peak, finite(tl.load(row_V + tokens, tokens < vocab_size, float("-inf"))))
            key, mass = key_of(gap), mass_of(gap, cold)
            upto_first += tl.where(key <= first, mass, 0.0)
            upto_second += tl.where(key <= second, mass, 0.0)
            upto_third += tl.where(key <= third, mass, 0.0)
            last_first = tl.maximum(last_first, tl.where(key <= first, key, 0))
            last_second = tl.maximum(last_second, tl.where(key <= second, key, 0))
            last_third = tl.maximum(last_third, tl.where(key <= third, key, 0))
        mass_first, mass_second, mass_third = tl.sum(upto_first), tl.sum(upto_second), tl.sum(upto_third)
        if mass_first >= target:
            high, upto_high = tl.max(last_first), mass_first
        elif mass_second >= target:
            low, upto_low = first, mass_first
            high, upto_high = tl.max(last_second), mass_second
        elif mass_third >= target:
            low, upto_low = second, mass_second
            high, upto_high = tl.max(last_third), mass_third
        else:
            low, upto_low = third, mass_third
        passes += 1
    return high


@triton.jit
def crossing(masses, point, SIZE: tl.constexpr):
    """Where the running sum of `masses` exceeds `point` of the whole: the index (SIZE if rounding hides it), the sum
    to exceed, and the sum before the index."""
    indices = tl.arange(0, SIZE)
    upto = tl.cumsum(masses, 0)
    target = (tl.max(upto, 0) * point).to(tl.float32)
    index = tl.min(tl.where((upto > target) & (masses > 0.0), indices, SIZE), 0)
    return index, target, tl.sum(tl.where(indices == index - 1, upto, 0.0), 0)
