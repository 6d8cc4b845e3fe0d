"""Attention over paged KV: one small interface, its backends, and the choice of one."""
