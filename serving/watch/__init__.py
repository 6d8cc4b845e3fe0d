"""Metrics, gauges in Ray's own metrics, and audits."""
