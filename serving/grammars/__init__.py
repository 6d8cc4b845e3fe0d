"""Constraints on what a model may generate, and their compiler."""
