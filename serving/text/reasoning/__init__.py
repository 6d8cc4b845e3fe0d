"""Thoughts in the text that models write: how each format looks, and how it is read."""
