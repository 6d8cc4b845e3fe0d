"""Replicas, dispatcher and HTTP in one process, with a trace of every turn. All is as in a cluster, but without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.front.http import create_http_app
from serving.front.recorder import Recorder
from serving.settings.record_args import LogsArgs, TracingArgs
from serving.trace.opening import front_traces, open_spans
from serving.wire.calls import Request, RunTurn, call_of, decode_request, encode_request
from serving.wire.turns import TurnCall
from tests.unit.serving.failover_rig import Failover, running_failover
from tests.unit.serving.local_service import MODEL, http_server
from tests.unit.serving.otlp_collector import Collector, running_collector


@dataclass
class Traced:
    client: httpx.AsyncClient
    failover: Failover
    collector: Collector
    spans: list[Any]

    async def sent(self) -> Collector:
        """Waits until the collector has all spans, and returns it."""
        await self.failover.settled()
        for each in self.spans:
            await asyncio.to_thread(each.flush)
        return self.collector


@asynccontextmanager
async def traced_service(
    directory: Path,
    logs: LogsArgs | None = None,
    *,
    max_running: int = 64,
    root_path: str = "",
    **tracing: Any,
) -> AsyncIterator[Traced]:
    async with AsyncExitStack() as stack:
        collector = stack.enter_context(running_collector())
        args = TracingArgs(endpoint=collector.endpoint, **tracing)
        front, replicas = open_spans(args, "ingress", "i"), open_spans(args, "replica", "r")
        for spans in (front, replicas):
            assert spans is not None
            stack.push_async_callback(asyncio.to_thread, spans.close)
        failover = await stack.enter_async_context(
            running_failover(
                directory,
                spans=replicas,
                traces=front_traces(front, MODEL.model_id),
                max_running=max_running,
            )
        )
        failover.service.beat()
        app = create_http_app(failover.service, recorder=Recorder(logs or LogsArgs(), front))
        address = await stack.enter_async_context(http_server(app, root_path=root_path))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=address, timeout=30.0))
        yield Traced(client, failover, collector, [front, replicas])


def over_the_wire(monkeypatch: pytest.MonkeyPatch, failover: Failover) -> None:
    """From now on calls to replicas are encoded and decoded, as on the wire."""
    plain = failover.replicas.turn

    def turn(replica_id: str, call: TurnCall, epoch: int | None) -> Any:
        request = decode_request(encode_request(Request(1, call_of(call, epoch))))
        assert isinstance(request.call, RunTurn)
        return plain(replica_id, request.call.turn, request.call.epoch)

    monkeypatch.setattr(failover.replicas, "turn", turn)
