"""Constraints on what a model may say, and their compiler."""
