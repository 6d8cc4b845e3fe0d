"""What the log in Redis keeps of a cluster itself: which deployment's settings apply, and the link secret."""

from __future__ import annotations

from controllers.session_log.log_cipher import LogCipher
from controllers.session_log.redis_log import Command, RedisLog

KEPT_S = 30 * 24 * 3600
"""How long after its last sweep a cluster may come back to its facts: Ray can restore it from Ray's own state."""


class ClusterFacts:
    """The facts of the log's cluster. Other clusters on the same log have their own."""

    def __init__(self, log: RedisLog, cipher: LogCipher) -> None:
        self._log = log
        self._cipher = cipher
        self._deployment_key = log.key("deployment", log.cluster)
        self._secret_key = log.key("link_secret", log.cluster)
        self._secret_place = f"the link secret of {log.cluster}"

    def deployment(self) -> str | None:
        (text,) = self._log.read(("GET", self._deployment_key))
        return None if text is None else text.decode()

    def set_deployment(self, text: str) -> None:
        self._log.change([("SET", self._deployment_key, text, "EX", KEPT_S)], though_full=True)

    def link_secret(self, new: bytes) -> bytes:
        """The log has one writer in each cluster, so nobody else stores a secret in between."""
        (found,) = self._log.read(("GET", self._secret_key))
        secret = new if found is None else self._cipher.decrypt(found, self._secret_place)
        stored = self._cipher.encrypt(secret, self._secret_place)
        self._log.change([("SET", self._secret_key, stored, "EX", KEPT_S)], though_full=True)
        return secret

    def kept(self) -> list[Command]:
        """The commands that keep the facts for another KEPT_S."""
        return [("EXPIRE", key, KEPT_S) for key in (self._deployment_key, self._secret_key)]
