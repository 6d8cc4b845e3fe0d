"""Chat templates, tokens to text and back, stop strings, control tokens, tool calls."""
