"""Settings that need other ones: where those are missing, or leave them nothing to do, they are refused by name."""

from __future__ import annotations

import pytest

from serving.settings.config import parse_args
from serving.settings.strict_settings import SettingsError

MODEL = {"path": "assets/models/kedge-chat"}
USELESS = [
    ("cache", {"disk_path": "kv"}, "disk_mib is 0"),
    ("cache", {"disk_mib": 0, "disk_path": "kv"}, "disk_mib is 0"),
    ("cache", {"disk_encrypted": True}, "disk_mib is 0"),
    ("cache", {"num_pages": 10, "size_mib": 10}, "not both"),
    ("rebalancing", {"enabled": False, "min_gap": 9.0}, "enabled is false"),
    ("speculation", {"draft_model": MODEL}, "is for method 'draft', not 'off'"),
    ("speculation", {"method": "ngram", "draft_model": MODEL}, "is for method 'draft', not 'ngram'"),
    ("speculation", {"ngram_size": 4}, "method is 'off'"),
    ("speculation", {"method": "off", "row_cost": 0.1}, "method is 'off'"),
    ("cache", {"num_pages": 10, "memory_share": 0.5}, "there is num_pages"),
    ("cache", {"size_mib": 10, "memory_share": 0.5}, "there is size_mib"),
    ("model", {**MODEL, "seed": 7}, "load_format 'dummy'"),
    ("tracing", {"sample_ratio": 0.1}, "without an endpoint"),
    ("tracing", {"service_name": "x"}, "without an endpoint"),
    ("controller", {"redis_wait_ms": 500}, "redis_wait_replicas"),
    ("controller", {"redis_url": "redis://localhost", "redis_wait_ms": 500}, "redis_wait_replicas"),
    ("logs", {"content": True}, "set access to"),
    ("tracing", {"record_content": True}, "endpoint"),
    ("ingress", {"operator_host": "0.0.0.0"}, "there is no operator_port"),
    ("ingress", {"max_ongoing_requests": 100, "max_websockets": 100}, "not below max_ongoing_requests, 100"),
]


@pytest.mark.parametrize(("section", "values", "reason"), USELESS)
def test_a_setting_that_would_do_nothing_is_refused(
    section: str, values: dict[str, object], reason: str
) -> None:
    """They were taken, and whoever wrote them thought that they had an effect."""
    key = next(key for key in reversed(values))
    with pytest.raises(SettingsError, match=rf"args\.{section}\.{key}: .*{reason}"):
        parse_args({"model": MODEL, section: values})


def test_conversations_that_are_not_recognized_have_no_timeout() -> None:
    unnamed = {"enabled": False, "idle_timeout_s": 5.0}
    with pytest.raises(SettingsError, match=r"args\.sessions\.unnamed\.idle_timeout_s: .*enabled is false"):
        parse_args({"model": MODEL, "sessions": {"unnamed": unnamed}})


def test_no_gpu_is_reserved_for_a_model_on_processors() -> None:
    with pytest.raises(SettingsError, match=r"args\.replicas: num_gpus 1 reserves what model\.device 'cpu'"):
        parse_args({"model": {**MODEL, "device": "cpu"}, "replicas": {"num_gpus": 1.0}})


def test_settings_that_do_something_are_taken() -> None:
    parse_args(
        {
            "model": {**MODEL, "load_format": "dummy", "seed": 7},
            "cache": {"memory_share": 0.5, "disk_mib": 5, "disk_path": "kv", "disk_encrypted": True},
            "speculation": {"method": "draft", "draft_model": MODEL, "draft_cost": 0.1},
            "controller": {
                "redis_url": "redis://localhost",
                "redis_wait_replicas": 1,
                "redis_wait_ms": 500,
                "heartbeat_interval_s": 0.1,
            },
            "logs": {"access": "errors", "content": True},
            "tracing": {"endpoint": "http://localhost:4318", "record_content": True, "sample_ratio": 0.1},
            "ingress": {"operator_port": 8001, "operator_host": "0.0.0.0", "max_websockets": 4095},
            "sessions": {"unnamed": {"enabled": False, "affinity": {"user": True}}},
            "replicas": {"step_timeout_s": 1, "num_gpus": 0.5},
            "rebalancing": {
                "enabled": False,
                "tokens_per_s": 9000.0,
            },  # the pace at which draining replicas hand over
            "metrics": {"audit_interval_s": 0.1},
        }
    )


def test_settings_with_all_defaults_written_out_are_taken() -> None:
    """What is shown of a server's settings may be written into a file."""
    args = parse_args({"model": MODEL})
    assert parse_args(args.model_dump()) == args


def test_the_default_number_of_websockets_is_not_for_few_requests() -> None:
    with pytest.raises(SettingsError, match=r"args\.ingress\.max_websockets: 1024 is not below"):
        parse_args({"model": MODEL, "ingress": {"max_ongoing_requests": 1024}})


def test_a_disk_needs_a_folder_and_host_memory() -> None:
    with pytest.raises(SettingsError, match=r"args\.cache\.disk_path: .*disk_mib needs a disk_path"):
        parse_args({"model": MODEL, "cache": {"disk_mib": 5}})
    with pytest.raises(SettingsError, match=r"args\.cache\.disk_mib: .*disk_mib needs a host_mib"):
        parse_args({"model": MODEL, "cache": {"disk_mib": 5, "disk_path": "kv", "host_mib": 0}})


@pytest.mark.parametrize("speculation", [{"method": "draft"}, {"method": "draft", "draft_model": None}])
def test_draft_needs_a_model(speculation: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=r"args\.speculation\.draft_model: .*needs a draft_model"):
        parse_args({"model": MODEL, "speculation": speculation})
