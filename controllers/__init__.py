"""Turns, ownership, placement, retention and the session log: pure logic, and one thin Ray actor around it."""
