"""The text of one request's output, token by token, up to a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.api import Finish, FinishReason, TextWatcher
from serving.text.detokenizer import Detokenizer
from serving.text.stop_strings import StopMatcher


class OutputText:
    """The text of one request as the client sees it: the same however the tokens are batched into events.

    Where a stop string may end the request, this is its TextWatcher: the engine's thread makes the text, and `push`
    only passes it on. Ownership: the engine's thread owns what makes text until the last delta, and the reader after
    that.
    """

    def __init__(
        self, detokenizer: Detokenizer, matcher: StopMatcher, *, trim_stop: bool, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._trim_stop = trim_stop
        self._tokens_to_pass = min_tokens
        self._watched: deque[str] = deque()
        """The text that each token added, as far as the engine's thread has made it and `push` has not taken it yet."""

    @property
    def watcher(self) -> TextWatcher | None:
        """None if there are no stop strings to find."""
        return self if self._matcher.stops else None

    def accept(self, token_id: int) -> str | None:
        text = self._detokenizer.push((token_id,))
        self._watched.append(self._matcher.feed(text, may_match=self._tokens_to_pass == 0))
        self._tokens_to_pass = max(self._tokens_to_pass - 1, 0)
        return self._matcher.matched

    def push(self, token_ids: Sequence[int], finish: Finish | None = None) -> str:
        """The text that these tokens add. Pass `finish` with the last ones (there may be none)."""
        if finish is not None and self._trim_stop and _stopped_by_token(finish) and token_ids:
            token_ids = token_ids[:-1]
        num_watched = min(len(self._watched), len(token_ids))
        watched = "".join([self._watched.popleft() for _ in range(num_watched)])
        if finish is None and num_watched == len(token_ids):
            return watched  # what makes text may be in use by the engine's thread
        text = self._detokenizer.push(token_ids[num_watched:])
        if finish is None:
            return watched + self._matcher.feed(text)
        return watched + self._matcher.feed(text + self._detokenizer.flush()) + self._matcher.flush()


def _stopped_by_token(finish: Finish) -> bool:
    return finish.reason is FinishReason.STOP and isinstance(finish.matched, int)
