"""A short request of each protocol that streams, by path, without `stream` and `model`."""

from __future__ import annotations

from typing import Any

PATHS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a dog", "sampling_params": {"max_new_tokens": 4}},
    "/v1/completions": {"prompt": "a dog", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a dog"}], "max_tokens": 4},
}

STREAMED: dict[str, dict[str, Any]] = PATHS | {
    "/v1/messages": {"messages": [{"role": "user", "content": "a dog"}], "max_tokens": 4},
    "/v1/responses": {"input": "a dog", "max_output_tokens": 16, "store": False},
}
