"""The random numbers of requests, a pure function of (seed, position), made cheap for successive positions."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from engine.runner.sampler import SEED_MASK, UNIT_53

MOST_SEEDS = 4096
NUMBERS_PER_BLOCK = 4


class DrawPoints:
    """Returns the same numbers as engine.runner.sampler.uniform. Owns a generator for each recently used seed."""

    def __init__(self) -> None:
        self._streams: OrderedDict[int, tuple[np.random.Philox, int]] = OrderedDict()

    def point(self, seed: int, position: int) -> float:
        generator, following = self._streams.pop(seed, (None, -1))
        if generator is None or following != position:
            generator = np.random.Philox(key=seed & SEED_MASK, counter=position)
        # Each position has a block of numbers; only the first is used.
        bits = int(generator.random_raw(NUMBERS_PER_BLOCK)[0])
        self._streams[seed] = generator, position + 1
        if len(self._streams) > MOST_SEEDS:
            self._streams.popitem(last=False)
        return float(bits >> 11) * UNIT_53
