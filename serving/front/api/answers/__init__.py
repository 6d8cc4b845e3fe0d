"""Requests and answers as all protocols have them: tools, what an answer is held to, its text as content and calls."""
