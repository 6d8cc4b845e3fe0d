"""Which settings apply: those of the application's newest deployment, whoever announces it and however often.

In a rolling update, replicas of two deployments run side by side, and both may connect again at any time. So each
deployment has an id, and is new to the controller only once. The log keeps the ids with the newest settings. So a
controller that restarts, with the settings that it was first created with, continues with the newest ones.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any

from controllers.errors import SettingsRefused, StoreError
from controllers.session_log.store import SessionStore
from controllers.settings import (
    ClusterSettings,
    Deployment,
    LogSettings,
    RebalancingSettings,
    RedisLogSettings,
    SqliteLogSettings,
)

KEPT_IDS = 64
"""How many of the latest deployments are remembered."""

WHAT_TO_DO = (
    "a controller keeps its session log for as long as it lives. Set it back; or give controller.name another value, "
    "whose sessions begin with that log; or stop the Ray cluster and start it with the new setting"
)


class Deployments:
    """`settings` are those of the newest deployment, or `first` if the log has none. One owner.

    Every method raises StoreError if the log cannot be used.
    """

    def __init__(self, store: SessionStore, log: LogSettings, first: ClusterSettings) -> None:
        self._store = store
        self._log = log
        self._ids: list[str] = []
        self.settings = first
        if (text := store.deployment()) is not None:
            self._ids, self.settings = _parsed(text, log)

    def announce(self, deployment: Deployment) -> bool:
        """True if the deployment is new. Its settings then apply from now on. A deployment that is known, the newest or
        an earlier one, changes nothing.

        Raises SettingsRefused if its log is not the controller's.
        """
        check_log(deployment.log, self._log)
        if deployment.deployment_id in self._ids:
            return False
        ids = [*self._ids, deployment.deployment_id][-KEPT_IDS:]
        self._store.set_deployment(json.dumps({"ids": ids, "settings": asdict(deployment.settings)}))
        self._ids, self.settings = ids, deployment.settings
        return True


def check_log(wanted: LogSettings, log: LogSettings) -> None:
    """Raises SettingsRefused if the logs differ. The error names the key at fault and says what to do."""
    if wanted == log:
        return
    match wanted, log:
        case _ if wanted.shards != log.shards:
            raise SettingsRefused(
                f"controller.shards cannot be changed from {log.shards} to {wanted.shards}: {WHAT_TO_DO}.",
                "controller.shards",
            )
        case _ if wanted.encrypted != log.encrypted and replace(wanted, encrypted=log.encrypted) == log:
            key = "encrypted"
        case SqliteLogSettings(), SqliteLogSettings() if wanted.path == log.path:
            key = "full_sync"
        case SqliteLogSettings(), SqliteLogSettings():
            key = "state_dir"
        case RedisLogSettings(), RedisLogSettings() if wanted.name != log.name:
            key = "name"
        case RedisLogSettings(), RedisLogSettings() if wanted.url == log.url:
            key = "redis_wait_replicas" if wanted.wait_ms == log.wait_ms else "redis_wait_ms"
        case _:
            key = "redis_url"
    raise SettingsRefused(
        f"controller.{key} cannot be changed from {_described(log)} to {_described(wanted)}: {WHAT_TO_DO}.",
        f"controller.{key}",
    )


def _described(log: LogSettings) -> str:
    if log.encrypted:
        return f"{_described(replace(log, encrypted=False))}, encrypted"
    if isinstance(log, SqliteLogSettings) and log.full_sync:
        return f"{log} with full_sync"
    if isinstance(log, RedisLogSettings) and log.wait_replicas:
        return f"{log} with {log.wait_replicas} replicas in {log.wait_ms} ms"
    return str(log)


def _parsed(text: str, log: LogSettings) -> tuple[list[str], ClusterSettings]:
    """The stored ids and settings. Those of another version may have unknown keys, or lack some."""
    try:
        record = json.loads(text)
        values = _known(ClusterSettings, record["settings"])
        if isinstance(rebalancing := values.get("rebalancing"), dict):
            values["rebalancing"] = RebalancingSettings(**_known(RebalancingSettings, rebalancing))
        return [str(each) for each in record["ids"]], ClusterSettings(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(f"session log {log}: its deployment cannot be read: {error!r}") from error


def _known(kind: type[ClusterSettings | RebalancingSettings], values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
