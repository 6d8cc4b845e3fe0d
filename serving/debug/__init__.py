"""Faults that are planted on purpose where `debug.faults` is set. Nothing of this is loaded where it is not."""
