"""Which requests without a session should be together at one replica: those with the same name for it.

A client's `prompt_cache_key` is such a name. An operator may let others count: the user that a request names, and a
cookie that tells browsers apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from serving.front.api.rules import rules_of


@dataclass(frozen=True, slots=True)
class AffinityKeys:
    """The keys of a connection's requests: `cookie` is what its cookie says, if that counts."""

    counts_user: bool = False
    cookie: str | None = None

    @classmethod
    def of(cls, connection: HTTPConnection) -> AffinityKeys:
        rules = rules_of(connection.app).affinity_rules
        cookie = None if rules.cookie is None else connection.cookies.get(rules.cookie)
        return cls(rules.user, cookie)

    def key(self, cache_key: str | None = None, user: str | None = None) -> str:
        """The `affinity_key` of a call; "" if nothing names it. The client's key goes before its user, and that before
        the cookie."""
        if cache_key:
            return f"key:{cache_key}"
        if self.counts_user and user:
            return f"user:{user}"
        return f"cookie:{self.cookie}" if self.cookie else ""
