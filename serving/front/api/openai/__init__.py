"""OpenAI's chat and text completions, list of models and tokenization."""
