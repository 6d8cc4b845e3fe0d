"""The KV books: which page belongs to whom. Integers only; no torch, no Ray, no HTTP."""
