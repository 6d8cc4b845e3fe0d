"""A replica's figures in Ray's metrics, under the names that vLLM and SGLang use there.

Ray's own Grafana boards for LLMs read `ray_vllm_*` or `ray_sglang_*` (Ray puts `ray_` before each name). This file says
which of these Kedge reports, and from what, and which it cannot report, and why. No figure stands in for another. Ray
adds the labels `deployment`, `replica`, `application` and `WorkerId`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ray.serve.metrics import Counter, Gauge, Histogram

from engine.api import EngineStats, FinishReason
from serving.watch.definitions import (
    INTER_TOKEN_BUCKETS_S,
    QUEUE_BUCKETS_S,
    REQUEST_BUCKETS_S,
    TOKEN_BUCKETS,
    TTFT_BUCKETS_S,
)
from serving.watch.metrics import EndedTurn

LLMNames = Literal["vllm", "sglang"]

MODEL = "model_name"
SERVE_REQUESTS = "serve_deployment_request_counter"
"""Serve's count of a deployment's requests. It does not see turns, which come over Kedge's own links. Ray's boards take
the list of deployments from it, and the board for vLLM also which process is which replica."""


@dataclass(frozen=True, slots=True)
class TurnFigure:
    """One figure of each turn that ends: counted up, or observed if there are `buckets`. `of` returns None for a turn
    without it. `source` says what the figure is."""

    name: str
    source: str
    of: Callable[[EndedTurn], float | None]
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class NowFigure:
    """A gauge computed from the engine's snapshot and from the previously published one."""

    name: str
    source: str
    of: Callable[[EngineStats, EngineStats], float | None]


def _time_per_token(turn: EndedTurn) -> float | None:
    if turn.decode_s is None or turn.output_tokens < 2:
        return None
    return turn.decode_s / (turn.output_tokens - 1)


def _used_share(stats: EngineStats, _before: EngineStats) -> float:
    """Cached pages can be evicted at once, so they count as free."""
    pages = stats.pages
    return 1.0 - (pages.free + pages.cached) / pages.total if pages.total else 0.0


def _cache_hit_rate(stats: EngineStats, before: EngineStats) -> float | None:
    """None if there was no input since then: the gauge keeps its value."""
    cached = stats.cached_tokens - before.cached_tokens
    wanted = cached + stats.prefill_tokens - before.prefill_tokens
    return cached / wanted if wanted else None


def _aborted(turn: EndedTurn) -> float:
    return float(turn.reason == FinishReason.ABORT.value)


TURN_FIGURES: Mapping[LLMNames, tuple[TurnFigure, ...]] = MappingProxyType(
    {
        "vllm": (
            TurnFigure("vllm_prompt_tokens", "input of turns", lambda t: t.prompt_tokens),
            TurnFigure("vllm_generation_tokens", "output of turns", lambda t: t.output_tokens),
            TurnFigure("vllm_prefix_cache_queries", "input of turns", lambda t: t.prompt_tokens),
            TurnFigure("vllm_prefix_cache_hits", "input whose KV was cached", lambda t: t.cached_tokens),
            TurnFigure(
                "vllm_request_prompt_tokens",
                "`kedge_prompt_tokens`",
                lambda t: t.prompt_tokens,
                TOKEN_BUCKETS,
            ),
            TurnFigure(
                "vllm_request_generation_tokens",
                "`kedge_output_tokens`",
                lambda t: t.output_tokens,
                TOKEN_BUCKETS,
            ),
            TurnFigure(
                "vllm_time_to_first_token_seconds", "`kedge_ttft_seconds`", lambda t: t.ttft_s, TTFT_BUCKETS_S
            ),
            TurnFigure(
                "vllm_request_time_per_output_token_seconds",
                "`kedge_decode_seconds` divided by the tokens after the first",
                _time_per_token,
                INTER_TOKEN_BUCKETS_S,
            ),
            TurnFigure(
                "vllm_e2e_request_latency_seconds",
                "`kedge_turn_seconds`",
                lambda t: t.turn_s,
                REQUEST_BUCKETS_S,
            ),
            TurnFigure(
                "vllm_request_queue_time_seconds",
                "`kedge_queue_seconds`",
                lambda t: t.queue_s,
                QUEUE_BUCKETS_S,
            ),
            TurnFigure(
                "vllm_request_prefill_time_seconds",
                "`kedge_prefill_seconds`",
                lambda t: t.prefill_s,
                QUEUE_BUCKETS_S,
            ),
            TurnFigure(
                "vllm_request_decode_time_seconds",
                "`kedge_decode_seconds`",
                lambda t: t.decode_s,
                REQUEST_BUCKETS_S,
            ),
        ),
        "sglang": (
            TurnFigure("sglang_prompt_tokens", "input of turns", lambda t: t.prompt_tokens),
            TurnFigure("sglang_generation_tokens", "output of turns", lambda t: t.output_tokens),
            TurnFigure("sglang_num_aborted_requests", "turns that ended in `abort`", _aborted),
            TurnFigure(
                "sglang_prompt_tokens_histogram",
                "`kedge_prompt_tokens`",
                lambda t: t.prompt_tokens,
                TOKEN_BUCKETS,
            ),
            TurnFigure(
                "sglang_generation_tokens_histogram",
                "`kedge_output_tokens`",
                lambda t: t.output_tokens,
                TOKEN_BUCKETS,
            ),
            TurnFigure(
                "sglang_time_to_first_token_seconds",
                "`kedge_ttft_seconds`",
                lambda t: t.ttft_s,
                TTFT_BUCKETS_S,
            ),
            TurnFigure(
                "sglang_inter_token_latency_seconds",
                "`kedge_decode_seconds` divided by the tokens after the first, once per turn",
                _time_per_token,
                INTER_TOKEN_BUCKETS_S,
            ),
            TurnFigure(
                "sglang_e2e_request_latency_seconds",
                "`kedge_turn_seconds`",
                lambda t: t.turn_s,
                REQUEST_BUCKETS_S,
            ),
            TurnFigure(
                "sglang_queue_time_seconds", "`kedge_queue_seconds`", lambda t: t.queue_s, QUEUE_BUCKETS_S
            ),
        ),
    }
)
NOW_FIGURES: Mapping[LLMNames, tuple[NowFigure, ...]] = MappingProxyType(
    {
        "vllm": (
            NowFigure("vllm_num_requests_running", "`kedge_requests_running`", lambda s, _: s.running),
            NowFigure("vllm_num_requests_waiting", "`kedge_requests_waiting`", lambda s, _: s.waiting),
            NowFigure(
                "vllm_kv_cache_usage_perc",
                "share of `kedge_kv_pages` that is neither `free` nor `cached`",
                _used_share,
            ),
        ),
        "sglang": (
            NowFigure("sglang_num_running_reqs", "`kedge_requests_running`", lambda s, _: s.running),
            NowFigure("sglang_num_queue_reqs", "`kedge_requests_waiting`", lambda s, _: s.waiting),
            NowFigure(
                "sglang_token_usage",
                "share of `kedge_kv_pages` that is neither `free` nor `cached`",
                _used_share,
            ),
            NowFigure(
                "sglang_cache_hit_rate",
                "`kedge_cached_tokens_total` as a share of all input, over five seconds",
                _cache_hit_rate,
            ),
        ),
    }
)
FINISHED = "vllm_request_success"
NOT_TOLD: Mapping[str, str] = MappingProxyType(
    {
        "vllm_num_requests_swapped": "Kedge moves the KV of idle sessions to host memory, not that of running requests",
        "vllm_nixl": "NIXL transfers KV between replicas; Kedge's KV stays at its replica",
        "vllm_kv_offload": "Kedge does not count bytes and times of single copies: see `kedge_demotions_total`, "
        "`kedge_promotions_total`, `kedge_host_kv_bytes`",
        "vllm_external_prefix_cache": "there is no external cache: KV that came back from host memory counts as a hit",
        "sglang_num_paused_reqs": "Kedge does not pause requests for new weights",
    }
)
"""What Ray's boards ask for and Kedge does not have, by the beginning of the name, and why."""


class RayLLM:
    """Create it inside a replica. `model` is the value of the label `model_name`."""

    def __init__(self, names: LLMNames, model: str) -> None:
        self._of_turns = [(figure, _made(figure, model)) for figure in TURN_FIGURES[names]]
        self._of_now = [(figure, _gauge(figure, model)) for figure in NOW_FIGURES[names]]
        self._before: EngineStats | None = None
        self._told: dict[str, float] = {}
        self._requests = Counter(SERVE_REQUESTS, "Turns.", ("route",))
        self._finished = None
        if names == "vllm":
            self._finished = _counter(
                FINISHED, "Turns by the reason for which they ended.", model, "finished_reason"
            )

    def ended(self, turn: EndedTurn) -> None:
        """Counts a turn of this replica that has ended."""
        for figure, made in self._of_turns:
            value = figure.of(turn)
            if value is None:
                continue
            if isinstance(made, Histogram):
                made.observe(value, {})
            elif value:
                made.inc(value, {})
        self._requests.inc(1, {"route": ""})
        if self._finished is not None:
            self._finished.inc(1, {"finished_reason": turn.reason})

    def publish(self, stats: EngineStats) -> None:
        """Call it every few seconds, see RayGauges."""
        before, self._before = self._before or stats, stats
        for figure, gauge in self._of_now:
            value = figure.of(stats, before)
            if value is not None:
                self._told[figure.name] = value
            gauge.set(self._told.get(figure.name, 0.0), {})


def _made(figure: TurnFigure, model: str) -> Counter | Histogram:
    if not figure.buckets:
        return _counter(figure.name, figure.source, model)
    made = Histogram(figure.name, figure.source, list(figure.buckets), (MODEL,))
    made.set_default_tags({MODEL: model})
    return made


def _gauge(figure: NowFigure, model: str) -> Gauge:
    made = Gauge(figure.name, figure.source, (MODEL,))
    made.set_default_tags({MODEL: model})
    return made


def _counter(name: str, text: str, model: str, *labels: str) -> Counter:
    made = Counter(name, text, (MODEL, *labels))
    made.set_default_tags({MODEL: model})
    return made
