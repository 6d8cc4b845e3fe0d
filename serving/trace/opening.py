"""Turns tracing on if the settings ask for it. Other modules import nothing of OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.settings.record_args import TracingArgs
from serving.trace.turn_traces import UNTRACED, FrontTraces, ReplicaTraces

if TYPE_CHECKING:
    from serving.trace.spans import Spans


def open_spans(args: TracingArgs, component: str, instance_id: str) -> Spans | None:
    """Returns None if nothing is traced. The caller must close the result."""
    if args.endpoint is None:
        return None
    from serving.trace.spans import Spans

    return Spans(args, component, instance_id)


def front_traces(spans: Spans | None, model: str) -> FrontTraces:
    if spans is None:
        return UNTRACED
    from serving.trace.front_turns import FrontTurns

    return FrontTurns(spans, model)


def replica_traces(spans: Spans | None, replica_id: str) -> ReplicaTraces:
    if spans is None:
        return UNTRACED
    from serving.trace.replica_turns import ReplicaTurns

    return ReplicaTurns(spans, replica_id)
