"""Makes the token chains in which session books keep their histories, for tests without an engine."""

from __future__ import annotations

from cache.token_chain import ANY_KV, TokenChain

PAGE_SIZE = 4


def make_chain(tenant: str, adapter: str) -> TokenChain:
    return ANY_KV.chain(f"{adapter}/{tenant}", PAGE_SIZE)
