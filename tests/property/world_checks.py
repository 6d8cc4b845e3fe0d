"""What must hold in a World after each event: accounts balance, every page has one account, locks are exact, and each
KV page that anybody may read, on the device or the host, holds the right tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cache.sequence_kv import SequenceKV, pages_for
from cache.slots import SlotState
from cache.token_chain import TokenChain
from cache.window_table import GONE

if TYPE_CHECKING:
    from tests.property.session_world import World


def check_world(world: World) -> None:
    driver = world.driver
    driver.check()
    sequences = [*driver.prefixes._in_flight, *driver.cache.tiers.orphans]
    for slot in driver.cache._slots:
        if slot.kv is not None:
            sequences.append(slot.kv)
        if slot.state in (SlotState.IDLE, SlotState.SAVING):
            assert slot.kv is not None
            _check_idle(world, slot.session_id, slot.kv)
        elif slot.state is SlotState.STORED:
            assert slot.entry is not None
            there = driver.runner._spilled if slot.entry.on_disk else driver.runner._saved
            held = there[slot.entry.key][0].reshape(-1)[: slot.usable_len].tolist()
            _check_chain(world, slot.session_id, slot.entry.chain, held)
    for live in driver.scheduler._live.values():
        if live.kv is not None:
            held = _read(driver.runner._kv, live.kv.pages, live.kv.committed_len)
            assert held == list(live.tokens.slice(0, len(held))), f"KV of {live.request_id}"
            _check_parts(world, live.kv, held, live.rollback_len)
            assert len(live.kv.chain) <= live.kv.committed_len
            assert live.kv.chain.common_len(_chain_of(live.kv.chain, held)) == len(live.kv.chain)
    for kv in sequences:
        _check_lengths(kv)
    for node in driver.prefixes._tree._nodes():
        assert _read(driver.runner._kv, node.pages, len(node.tokens)) == node.tokens.tolist(), (
            "KV of a prefix"
        )
        _check_node_window(world, node.window_pages, node.tokens)
    for status in world.controller.snapshot():
        session = world.sessions[status.session_id]
        assert (status.tokens, status.turns) == (len(session.history), session.turns)
        assert status.in_turn == driver.scheduler.in_turn(status.session_id)


def _check_lengths(kv: SequenceKV) -> None:
    assert 0 <= kv.protected_len <= kv.committed_len <= kv.allocated_len or kv.committed_len == 0
    assert kv.draft_len <= kv.committed_len
    assert kv.num_pages == pages_for(kv.allocated_len, kv.page_size)
    assert kv.contiguous == bool((np.diff(kv.pages) == 1).all())
    if kv.window is not None:
        table = kv.window
        assert table.num_pages == kv.num_pages
        live = np.ones(table.num_pages, dtype=bool)
        live[: table.first] = live[table.gap_start : table.gap_end] = False
        assert ((table.pages != GONE) == live).all(), "the window's limits and its entries differ"


def _check_idle(world: World, session_id: str, kv: SequenceKV) -> None:
    held = _read(world.driver.runner._kv, kv.pages, len(kv.chain))
    _check_chain(world, session_id, kv.chain, held)
    if len(kv.chain) == kv.committed_len:
        _check_parts(world, kv, held, 0)


def _check_chain(world: World, session_id: str, chain: TokenChain, held: list[int]) -> None:
    """The chain gives the tokens of the KV, even if the session has another history by now."""
    expected = _chain_of(chain, held)
    assert chain.common_len(expected) == len(held) == len(chain), f"KV of idle session {session_id}"
    for index in range(chain.num_pages):
        assert chain.page_hash(index) == expected.page_hash(index)
    world.events["stale KV seen"] += held != world.sessions[session_id].history[: len(held)]


def _chain_of(chain: TokenChain, tokens: list[int]) -> TokenChain:
    """A new chain of these tokens, of the same tenant and model."""
    fresh = chain.prefix(0)
    fresh.extend(tokens)
    return fresh


def _check_parts(world: World, kv: SequenceKV, tokens: Sequence[int], rollback_len: int) -> None:
    """Checks the draft model's KV and all window KV that the next query and a rollback see."""
    runner = world.driver.runner
    if world.sizes.speculation == "draft":
        assert _read(runner._draft_kv, kv.pages, kv.draft_len) == list(tokens[: kv.draft_len]), "draft KV"
    if kv.window is None:
        return
    assert world.sizes.window_len is not None
    ends = [len(tokens)] + ([rollback_len] if 0 < rollback_len <= len(tokens) else [])
    for end in ends:
        first = max(0, end - world.sizes.window_len + 1) // kv.page_size
        last = pages_for(end, kv.page_size)
        if end != len(tokens) and (kv.window.pages[first:last] == GONE).any():
            # A turn that began with less KV than its history may lack window KV that a rollback needs.
            world.events["rollback without window"] += 1
            continue
        held = _read(runner._window_kv, kv.window.pages[first:last], end - first * kv.page_size)
        assert held == list(tokens[first * kv.page_size : end]), "window KV"


def _check_node_window(world: World, pages: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
    size = world.sizes.page_size
    for index in np.flatnonzero(pages != GONE).tolist():
        held = world.driver.runner._window_kv[pages[index]].tolist()
        assert held == tokens[index * size : (index + 1) * size].tolist(), "window KV of a shared prefix"


def _read(kv: NDArray[np.int32], pages: NDArray[np.int32], length: int) -> list[int]:
    held: list[int] = kv[pages].reshape(-1)[:length].tolist()
    return held
