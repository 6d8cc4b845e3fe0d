"""The cost of knowing which KV belongs to which history: a turn's hashing by length of history, and one-time costs.

    python -m benchmarks.in_process.kv_identity --json kv_identity.json

A turn compares the slot's chain with its history's, and extends both by its tokens. One-time costs are the chain of a
history that was loaded from the log, the comparison with KV that differs, and a copy for the host or for a fork.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measure import save_record
from cache.token_chain import KVIdentity, TokenChain

IDENTITY = KVIdentity("fingerprint", "format")
PAGE_SIZE = 16
NEW_TOKENS, OUTPUT_TOKENS = 16, 8
LENGTHS = (1_000, 32_000, 1_000_000)
TURNS, ROUNDS = 300, 5


def chain_of(tokens: list[int]) -> TokenChain:
    chain = IDENTITY.chain("tenant", PAGE_SIZE)
    chain.extend(tokens)
    return chain


def turn_us(history: list[int]) -> float:
    """Median microseconds of CPU time of one turn's hashing, for both the slot's chain and the history's."""
    book, kv = chain_of(history), chain_of(history[:-1])
    new = history[:NEW_TOKENS] + history[:OUTPUT_TOKENS]
    times_s = []
    for _ in range(TURNS):
        known = history[-1:] + new[:-1]  # the next turn computes the last token's KV
        begun_s = time.thread_time()
        assert kv.common_len(book) == len(kv)
        kv.extend(known)
        book.extend(new)
        times_s.append(time.thread_time() - begun_s)
        book.cut(len(history))
        kv.cut(len(history) - 1)
    return statistics.median(times_s) * 1e6


def once_us(action: Callable[[], object]) -> float:
    """Median microseconds of CPU time."""
    times_s = []
    for _ in range(ROUNDS):
        begun_s = time.thread_time()
        action()
        times_s.append(time.thread_time() - begun_s)
    return statistics.median(times_s) * 1e6


def figures(length: int) -> dict[str, float]:
    history = np.random.default_rng(length).integers(0, 2**17, length).tolist()
    chain = chain_of(history)
    other = chain_of([*history[: length // 3], *history[::-1]])
    return {
        "turn_us": turn_us(history),
        "from_the_log_us": once_us(lambda: chain_of(history)),
        "stale_us": once_us(lambda: chain.common_len(other)),
        "copy_us": once_us(lambda: chain.prefix(length)),
        "bytes_a_token": (len(chain._tokens) + len(chain._digests)) / length,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = {length: figures(length) for length in LENGTHS}
    table = Table("history, tokens", "a turn of 16 + 8, µs", "chain from the log, ms", "KV that differs, µs",
                  "a copy, µs", "bytes a token")  # fmt: skip
    for length, row in rows.items():
        table.add_row(f"{length:,}", f"{row['turn_us']:.1f}", f"{row['from_the_log_us'] / 1e3:.2f}",
                      f"{row['stale_us']:.1f}", f"{row['copy_us']:.1f}", f"{row['bytes_a_token']:.1f}")  # fmt: skip
    Console(width=110).print(table)
    save_record(args.json, page_size=PAGE_SIZE, lengths=rows)


if __name__ == "__main__":
    main()
