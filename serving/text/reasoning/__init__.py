"""Thoughts in the text that models write: the formats, and how they are read."""
