"""Two ways to talk with the model under test: through the served API, or with `transformers` in this process."""

import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from assets.training.train_tokenizer import TURN_END

SESSION_HEADER = "x-session-id"
MAX_REPLY_TOKENS = 120


class Talk(AbstractContextManager["Talk"], Protocol):
    """One conversation. The other side keeps the history."""

    def say(self, user: str) -> str:
        """Sends one user message and returns the whole reply."""
        ...


OpenTalk = Callable[[str | None], Talk]


class ServedTalk:
    """A session on the server. It gets only the new messages and is closed at the end."""

    def __init__(self, client: httpx.Client, model: str, system: str | None) -> None:
        self._client = client
        self._model = model
        self._unsent = [{"role": "system", "content": system}] if system else []
        self.session_id = f"recall-{uuid.uuid4().hex}"

    def __enter__(self) -> "ServedTalk":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.post("/close_session", json={"session_id": self.session_id})

    def say(self, user: str) -> str:
        body = {
            "model": self._model,
            "messages": [*self._unsent, {"role": "user", "content": user}],
            "temperature": 0,
            "max_tokens": MAX_REPLY_TOKENS,
        }
        answer = self._client.post(
            "/v1/chat/completions", json=body, headers={SESSION_HEADER: self.session_id}
        )
        answer.raise_for_status()
        self._unsent = []
        return str(answer.json()["choices"][0]["message"]["content"])


def served(client: httpx.Client) -> OpenTalk:
    """Talks to the first model that the server lists."""
    listing = client.get("/v1/models")
    listing.raise_for_status()
    model = str(listing.json()["data"][0]["id"])
    return lambda system: ServedTalk(client, model, system)


class LocalTalk:
    """Greedy decoding in this process. The KV cache grows with the conversation."""

    def __init__(self, model: Any, tokenizer: Any, system: str | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._cache = DynamicCache()
        self._turn_end = int(tokenizer.convert_tokens_to_ids(TURN_END))
        self._pending: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._tail: list[int] = []

    def __enter__(self) -> "LocalTalk":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._cache

    @torch.no_grad()
    def say(self, user: str) -> str:
        text = self._tokenizer.apply_chat_template(
            [*self._pending, {"role": "user", "content": user}], tokenize=False, add_generation_prompt=True
        )
        self._pending = []
        new = [*self._tail, *self._tokenizer.encode(text, add_special_tokens=False)]
        reply: list[int] = []
        while len(reply) < MAX_REPLY_TOKENS:
            output = self._model(torch.tensor([new]), past_key_values=self._cache, use_cache=True)
            new = [int(output.logits[0, -1].argmax())]
            if new[0] == self._turn_end:
                break
            reply += new
        # The reply's end is not in the cache yet. The template puts a line break after it.
        self._tail = [self._turn_end, *self._tokenizer.encode("\n", add_special_tokens=False)]
        return str(self._tokenizer.decode(reply))


def local(directory: Path) -> OpenTalk:
    """Talks to a model directory through `transformers` in float32."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return lambda system: LocalTalk(model, tokenizer, system)
