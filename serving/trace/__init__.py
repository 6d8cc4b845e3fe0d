"""Spans along the steps of a turn. OpenTelemetry is imported only if `tracing.endpoint` is set."""
