"""What is told of a setting that is refused: the key and what was expected, in words, and no password."""

from __future__ import annotations

import pytest
import yaml

from serving.settings.config import parse_args
from serving.settings.strict_settings import SettingsError

MODEL = {"path": "assets/models/kedge-chat"}


def test_a_fault_reads_as_one_sentence() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_args({"model": MODEL, "zz": 1, "cache": {}})
    assert "\n  args: unknown key 'zz'; known keys: model, cache" in str(caught.value)
    assert "Value error" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "text", "told"),
    [
        ("cache", "", "args.cache: a mapping of keys to values was expected, not nothing"),
        ("cache", "5", "args.cache: a mapping of keys to values was expected, not 5"),
        ("cache", "{size_mib: 256MiB}", "args.cache.size_mib: a whole number was expected, not '256MiB'"),
        ("cache", "{size_mib: 1e3}", "args.cache.size_mib: a whole number was expected, not '1e3'"),
        ("cache", "{size_mib: 1.5}", "args.cache.size_mib: a whole number was expected, not 1.5"),
        ("cache", "{memory_share: 90%}", "args.cache.memory_share: a number was expected, not '90%'"),
        ("cache", "{prefix_cache: 1}", "args.cache.prefix_cache: true or false was expected, not 1"),
        ("sessions", "{idle_timeout_s: 1h}", "args.sessions.idle_timeout_s: a number was expected, not '1h'"),
        ("controller", "{name: 4}", "args.controller.name: text was expected, not 4"),
        (
            "controller",
            "{redis_url: h:6379}",
            "args.controller.redis_url: redis://…, rediss://…, unix:///… or",
        ),
        ("ingress", "{allowed_origins: x}", "args.ingress.allowed_origins: a list was expected, not text"),
        ("ingress", "{allowed_origins: ['*']}", "args.ingress.allowed_origins.0: a site as browsers name it"),
        (
            "ingress",
            "{allowed_hosts: ['k:80']}",
            "args.ingress.allowed_hosts.0: a name in lower case and without a",
        ),
        ("tracing", "{endpoint: h:4317}", "args.tracing.endpoint: http://… or https://… was expected"),
        ("model", "{path: x, name: ''}", "args.model.name: "),
        (
            "model",
            "{path: x, tool_calls: on}",
            "args.model.tool_calls: Input should be 'auto', 'off', 'hermes'",
        ),
    ],
)
def test_what_was_expected_is_told_in_words(section: str, text: str, told: str) -> None:
    """pydantic spoke of dictionaries and tuples, printed patterns, and did not say what YAML had read."""
    with pytest.raises(SettingsError) as caught:
        parse_args({"model": MODEL, section: yaml.safe_load(text)})
    assert f"\n  {told}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("redis://:topsecret@host", "args.controller: a mapping of keys to values was expected, not text"),
        (
            "[redis://:topsecret@host]",
            "args.controller: a mapping of keys to values was expected, not a list",
        ),
        (
            "{redis_url: [redis://:topsecret@host]}",
            "args.controller.redis_url: text was expected, not a list",
        ),
        (
            "{redis_url: {redis: ':topsecret@host'}}",
            "args.controller.redis_url: text was expected, not a mapping",
        ),
        (
            "{redis_url: 'redis://:topsecret/@host/0'}",
            "args.controller.redis_url: redis://host:port/db, with",
        ),
        ("{redis_url: 'redis+sentinel://:topsecret/@h/m/0'}", "args.controller.redis_url: redis+sentinel://"),
        (
            "{redis_url: 'redis+sentinel://:topsecret/x'}",
            "args.controller.redis_url: a Sentinel is no host:port",
        ),
    ],
)
def test_a_password_at_a_wrong_place_is_not_told(text: str, told: str) -> None:
    """The first 40 characters of a value of a wrong type were shown, and all of an address with a slash in its
    password."""
    with pytest.raises(SettingsError) as caught:
        parse_args({"model": MODEL, "controller": yaml.safe_load(text)})
    assert f"\n  {told}" in str(caught.value)
    assert "topsecret" not in str(caught.value)
