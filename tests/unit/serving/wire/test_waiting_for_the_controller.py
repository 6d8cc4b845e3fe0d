"""A process that starts while the controller or its log is away waits for it: it does not load its model again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve

from controllers.errors import NoAnswer, SettingsRefused, StoreError
from serving.front import ingress
from serving.replica import environment
from serving.settings.config import parse_args
from serving.wire import controller_calls
from serving.wire.controller_calls import ControllerCalls, once_up

ARGS = parse_args({"model": {"path": "a-model"}})
DEPLOYMENT = ARGS.deployment("first")


class Shard:
    """The first shard. Each of `failures` is raised once instead of an answer."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    async def link_secret(self) -> bytes:
        if self.failures:
            raise self.failures.pop(0)
        return b"s" * 32


@pytest.fixture(autouse=True)
def serve_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray Serve tells its replicas."""
    itself = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"), deployment="Ingress")
    context = SimpleNamespace(get_node_id=lambda: "n1", get_actor_name=lambda: "actor", namespace="serve")
    monkeypatch.setattr(serve, "get_replica_context", lambda: itself)
    monkeypatch.setattr(serve, "get_deployment_handle", lambda _name: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    for module in (environment, ingress):
        monkeypatch.setattr(module, "log_with_serve", lambda _logs: None)
    monkeypatch.setattr(controller_calls, "START_PAUSE_S", 0.0)


@pytest.mark.parametrize("start", [environment.environment_in_serve, ingress.environment_in_serve])
async def test_a_process_that_starts_waits_for_the_secret(
    start: Callable[..., Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica's start used to fail after 15 s, and the next try loaded the model again."""
    shard: Any = Shard(NoAnswer("the controller does not answer"), StoreError("the log is away"))
    calls = ControllerCalls([shard])
    for module in (environment, ingress):
        monkeypatch.setattr(module, "connect_controller", lambda _name, _deployment: calls)
    found = await start(ARGS, deployment=DEPLOYMENT)
    assert found.controller is calls
    assert not shard.failures


async def test_the_wait_is_bounded_and_ends_at_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused() -> None:
        raise SettingsRefused("another log", "controller.state_dir")

    async def away() -> None:
        raise NoAnswer("the controller does not answer")

    with pytest.raises(SettingsRefused):
        await once_up(refused)
    monkeypatch.setattr(controller_calls, "START_TIMEOUT_S", 0.05)
    with pytest.raises(TimeoutError):
        await once_up(away)
