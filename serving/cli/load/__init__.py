"""The load generator behind `kedge bench`: multi-turn sessions against any OpenAI-compatible server.

The client must cost little next to the server it measures: while a turn streams it only notes when bytes
arrive; everything is parsed after the turn. Imports neither torch nor Ray.
"""
