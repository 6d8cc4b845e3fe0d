"""One session of the load: what each turn sends, and what it adds to the history from the answer."""

from __future__ import annotations

from typing import Any

from serving.cli.client.server import MODE_HEADER, SESSION_HEADER
from serving.cli.load.prompts import PromptSource
from serving.cli.load.sample import TurnSample
from serving.cli.load.settings import Endpoint, LoadError, LoadSettings, Mode, PromptKind
from serving.cli.load.turn import TurnRequest


class Dialogue:
    """Builds the turns of one session. In resend mode it keeps the history, otherwise the server does."""

    def __init__(
        self, settings: LoadSettings, prompts: PromptSource, number: int, session_id: str, words_per_turn: int
    ) -> None:
        self.number = number
        self.session_id = session_id
        self._settings = settings
        self._prompts = prompts
        self._words_per_turn = words_per_turn
        self._messages: list[dict[str, str]] = []
        self._text = ""
        self._token_ids: list[int] = []
        self._prompt_tokens = 0

    def request(self, turn: int) -> TurnRequest:
        """The request of turn `turn` (from 1): only its own part, or the whole history."""
        settings = self._settings
        body: dict[str, Any] = {
            "model": settings.model,
            "max_tokens": settings.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._prompt(turn),
        }
        if settings.ignore_eos:
            body["ignore_eos"] = True
        if settings.mode is Mode.SESSION or settings.prompt is PromptKind.IDS:
            # Left out in resend mode with text: vLLM would send back the ids of the whole history.
            body["return_token_ids"] = True
        headers = (
            {SESSION_HEADER: self.session_id, MODE_HEADER: "append"} if settings.mode is Mode.SESSION else {}
        )
        return TurnRequest(self.number, turn, settings.url + settings.endpoint.path, body, headers)

    def _prompt(self, turn: int) -> dict[str, Any]:
        """Adds the turn's input to the kept history, and returns what to send."""
        settings = self._settings
        if settings.mode is Mode.SESSION:
            self._messages, self._text, self._token_ids = [], "", []
        if settings.prompt is PromptKind.IDS:
            self._token_ids += self._prompts.token_ids(self.number, turn, settings.input_tokens)
            return {"prompt": list(self._token_ids)}
        words = self._prompts.words(self.number, turn, self._words_per_turn)
        if settings.endpoint is Endpoint.CHAT:
            self._messages.append({"role": "user", "content": words})
            return {"messages": list(self._messages)}
        self._text += f" {words}"
        return {"prompt": self._text}

    def absorb(self, sample: TurnSample) -> None:
        """Adds the answer to the history. Raises LoadError if the server cannot run this load."""
        settings = self._settings
        if settings.mode is Mode.SESSION:
            self._check_session_grew(sample)
        elif settings.prompt is PromptKind.IDS:
            if not sample.token_ids:
                raise LoadError("the server does not return token ids (return_token_ids): use --prompt text")
            self._token_ids += sample.token_ids
        elif settings.endpoint is Endpoint.CHAT:
            self._messages.append({"role": "assistant", "content": sample.text})
        else:
            self._text += sample.text

    def _check_session_grew(self, sample: TurnSample) -> None:
        if sample.usage is None:
            return
        if sample.usage.prompt_tokens <= self._prompt_tokens:
            raise LoadError(
                f"the server does not keep sessions: turn {sample.turn} has {sample.usage.prompt_tokens} "
                f"prompt tokens, the turn before had {self._prompt_tokens}. Use --mode resend"
            )
        self._prompt_tokens = sample.usage.prompt_tokens + sample.usage.completion_tokens
