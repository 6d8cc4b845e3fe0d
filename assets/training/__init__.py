"""Generates dialogues, trains the embedded chat model and its draft, measures recall."""
