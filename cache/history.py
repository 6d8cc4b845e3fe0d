"""History: the committed tokens that a session's turn, or a fork of it, brings along. They decide which KV may be
used."""

from __future__ import annotations

from collections.abc import Sequence

from cache.token_chain import TokenChain


class History:
    """The first `length` of `tokens`, which are lent: they do not change while this is in use.

    `chain` begins with the same tokens. The owner of the history keeps it, so that a turn costs the same at any length.
    Without it the tokens are hashed here, once, when needed.
    """

    __slots__ = ("_chain", "_tokens", "length")

    def __init__(self, tokens: Sequence[int], length: int, chain: TokenChain | None = None) -> None:
        self._tokens = tokens
        self._chain = chain
        self.length = length

    def agreed_len(self, kv: TokenChain) -> int:
        """How many tokens of the history, from the first on, `kv` begins with."""
        if self.length == 0:
            return 0
        if self._chain is None:
            self._chain = kv.prefix(0)
            self._chain.extend(self._tokens[: self.length])
        return min(kv.common_len(self._chain), self.length)
