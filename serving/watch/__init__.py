"""Metrics, gauges of Ray, audits."""
