"""Spans along the steps of a turn. OpenTelemetry is imported only where `tracing.endpoint` is set."""
