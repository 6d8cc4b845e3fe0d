"""Faults that are planted on purpose if `debug.faults` is set. Otherwise nothing of this is loaded."""
