"""Embedded models and the scripts that make them."""
