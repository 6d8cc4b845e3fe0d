"""Ray's dashboards for LLMs: each metric name that they ask for is exported, or known not to be. No others are
exported."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from ray.dashboard.modules.metrics.dashboards.common import DashboardConfig
from ray.dashboard.modules.metrics.dashboards.serve_llm_dashboard_panels import serve_llm_dashboard_config
from ray.dashboard.modules.metrics.dashboards.serve_llm_sglang_dashboard_panels import (
    serve_llm_sglang_dashboard_config,
)

from serving.watch.metrics import EndedTurn
from serving.watch.ray_llm import FINISHED, MODEL, NOT_TOLD, NOW_FIGURES, TURN_FIGURES, LLMNames, RayLLM
from tests.unit.serving.engine_figures import stats

BOARDS: list[tuple[LLMNames, DashboardConfig]] = [
    ("vllm", serve_llm_dashboard_config),
    ("sglang", serve_llm_sglang_dashboard_config),
]
TURN = EndedTurn("stop", 100, 60, 8, turn_s=1.2, queue_s=0.3, decode_s=0.7, ttft_s=0.5, prefill_s=0.2)


def series(names: LLMNames) -> set[str]:
    """The series that Ray serves of these metrics, with the suffixes of each kind."""
    told = {f"ray_{each.name}" for each in NOW_FIGURES[names]}
    for each in TURN_FIGURES[names]:
        suffixes = ("bucket", "count", "sum") if each.buckets else ("total",)
        told |= {f"ray_{each.name}_{suffix}" for suffix in suffixes}
    return told | ({f"ray_{FINISHED}_total"} if names == "vllm" else set())


def asked(board: DashboardConfig, names: LLMNames) -> set[str]:
    queries = [target.expr for row in board.rows for panel in row.panels for target in panel.targets]
    return {name for query in queries for name in re.findall(rf"\bray_{names}_\w+", query)}


@pytest.mark.parametrize(("names", "board"), BOARDS)
def test_boards_find_what_is_told(names: LLMNames, board: DashboardConfig) -> None:
    missing = asked(board, names) - series(names)
    unknown = {name for name in missing if not any(name.startswith(f"ray_{start}") for start in NOT_TOLD)}
    assert unknown == set()


@pytest.mark.parametrize(("names", "board"), BOARDS)
def test_nothing_is_told_that_no_board_asks_for(names: LLMNames, board: DashboardConfig) -> None:
    wanted = {re.sub(r"_(bucket|count|sum|total)$", "", name) for name in asked(board, names)}
    told = {f"ray_{each.name}" for each in (*TURN_FIGURES[names], *NOW_FIGURES[names])}
    assert told - wanted == set()


@pytest.mark.parametrize(("names", "_board"), BOARDS)
def test_rays_metrics_take_it(names: LLMNames, _board: DashboardConfig) -> None:
    told = RayLLM(names, "m")
    told.ended(TURN)
    told.ended(replace_turn(output_tokens=0, decode_s=None, ttft_s=None, prefill_s=None, reason="abort"))
    told.publish(stats())
    told.publish(replace(stats(), cached_tokens=860, prefill_tokens=940))
    for _, made in (*told._of_turns, *told._of_now):
        assert made.info["default_tags"][MODEL] == "m"


def test_the_rate_of_hits_is_that_of_now() -> None:
    told = RayLLM("sglang", "m")
    told.publish(stats())
    told.publish(replace(stats(), cached_tokens=860, prefill_tokens=940))
    assert told._told["sglang_cache_hit_rate"] == pytest.approx(0.6)
    told.publish(replace(stats(), cached_tokens=860, prefill_tokens=940))
    assert told._told["sglang_cache_hit_rate"] == pytest.approx(0.6), "without input it stays"
    assert told._told["sglang_token_usage"] == pytest.approx(0.3)


def test_time_per_token_is_between_tokens() -> None:
    (per_token,) = (each for each in TURN_FIGURES["vllm"] if "per_output" in each.name)
    assert per_token.of(TURN) == pytest.approx(0.1)
    assert per_token.of(replace_turn(output_tokens=1)) is None


def replace_turn(**fields: Any) -> EndedTurn:
    return TURN._replace(**fields)
