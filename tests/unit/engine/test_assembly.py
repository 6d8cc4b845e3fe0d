"""An engine is put together to match pool, limits and settings."""

from __future__ import annotations

import pytest

from engine.assembly import assemble_engine
from engine.settings import CacheSettings, PoolTooSmall, SchedulerSettings, SpeculationSettings
from tests.unit.engine.driver import VOCAB, request
from tests.unit.engine.engine_rig import WAIT_S, Rig, running
from tests.unit.engine.null_runner import NULL_IDENTITY, NullRunner


def test_the_runner_sizes_the_pool() -> None:
    runner = NullRunner(24, 16, VOCAB, 128)
    engine = assemble_engine(
        runner,
        CacheSettings(page_size=16, num_pages=9999),
        SchedulerSettings(),
        SpeculationSettings(),
        frozenset(),
        lambda _: None,
    )
    stats = engine.stats()
    assert (stats.pages.total, stats.pages.free, stats.page_size) == (24, 24, 16)
    assert engine.vocab_size == VOCAB


def test_chains_are_of_the_runner_s_model_and_the_tenant() -> None:
    engine = Rig(page_size=4).engine
    chain = engine.empty_chain("tenant")
    chain.extend(range(9))
    assert engine.describe()["model_fingerprint"] == NULL_IDENTITY.weights == "null"
    same = NULL_IDENTITY.chain("tenant", 4)
    same.extend(range(9))
    assert (chain.common_len(same), chain.page_hash(2)) == (9, same.page_hash(2))
    assert chain.common_len(engine.empty_chain("other")) == 0


@pytest.mark.parametrize(("asked", "expected"), [(None, 128), (64, 64), (4096, 128)])
def test_the_context_is_the_shorter_of_model_and_setting(asked: int | None, expected: int) -> None:
    runner = NullRunner(24, 16, VOCAB, 128)
    settings = SchedulerSettings(max_context_len=asked)
    engine = assemble_engine(
        runner, CacheSettings(), settings, SpeculationSettings(), frozenset(), lambda _: None
    )
    assert engine.max_context_len == expected


def test_a_pool_with_too_few_window_pages_is_refused_before_any_step_is_measured() -> None:
    runner = NullRunner(8, 1, VOCAB, 128, window_len=3, num_window_pages=2)
    speculation = SpeculationSettings("ngram", max_draft_tokens=7)
    with pytest.raises(PoolTooSmall, match="the pool has 2"):
        assemble_engine(
            runner, CacheSettings(1), SchedulerSettings(), speculation, frozenset(), lambda _: None
        )


@pytest.mark.parametrize(("shared", "expected"), [(True, 16), (False, 0)])
def test_the_prefix_cache_can_be_off(shared: bool, expected: int) -> None:
    rig = Rig()
    rig.engine = assemble_engine(
        rig.runner,
        CacheSettings(4, prefix_cache=shared),
        SchedulerSettings(),
        SpeculationSettings(),
        frozenset(),
        rig._sink,
    )
    rig.engine.start()
    rig.generate(request("warm", range(1, 20), 2))
    assert rig.generate(request("r", range(1, 20), 2)).cached == expected
    rig.engine.stop(WAIT_S)


def test_a_new_engine_is_not_alive_until_it_is_started() -> None:
    with running() as rig:
        assert rig.engine.alive
    assert not Rig().engine.alive
