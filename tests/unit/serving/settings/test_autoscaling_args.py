"""`replicas.autoscaling`: bounds, targets and delays, in place of a number."""

from __future__ import annotations

from typing import Any

import pytest

from serving.settings.config import AppArgs, parse_args
from serving.settings.replica_args import AutoscalingArgs
from serving.settings.strict_settings import SettingsError


def parsed(**replicas: Any) -> AppArgs:
    return parse_args({"model": {"path": "assets/models/kedge-chat"}, "replicas": replicas})


def test_defaults() -> None:
    assert parsed().replicas.autoscaling is None
    assert parsed(autoscaling={"max_replicas": 4}).replicas.autoscaling == AutoscalingArgs(
        min_replicas=1,
        max_replicas=4,
        target_turns_in_flight=16,
        target_kv_utilization=0.8,
        look_back_s=30,
        upscale_delay_s=30,
        downscale_delay_s=600,
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("min_replicas", 0),
        ("min_replicas", 1.5),
        ("max_replicas", 1),
        ("max_replicas", "4"),
        ("target_turns_in_flight", 0),
        ("target_kv_utilization", 0),
        ("target_kv_utilization", 1.1),
        ("look_back_s", 10),
        ("upscale_delay_s", -1),
        ("downscale_delay_s", float("inf")),
    ],
)
def test_a_bad_value_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"args\.replicas\.autoscaling\.{key}: "):
        parsed(autoscaling={"min_replicas": 2, "max_replicas": 3} | {key: value})


def test_a_number_beside_it_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"args\.replicas: count and autoscaling exclude each other"):
        parsed(count=2, autoscaling={"max_replicas": 4})
    assert parsed(count=3, autoscaling=None).replicas.count == 3
