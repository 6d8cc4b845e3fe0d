"""Runners: make tensors of a step's batch, hold the memory of KV and its copies, and pick tokens."""
