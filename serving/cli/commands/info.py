"""`kedge info`: what a server runs, on one screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import typer
from rich.table import Table

from serving.cli.client.server import server_at
from serving.cli.client.server_facts import ServerFacts, gather_facts, pools_of, state_of
from serving.cli.commands.failure import one_line_errors
from serving.cli.commands.options import DEFAULT_URL, ApiKey, AsJson, Url
from serving.cli.commands.output import output
from serving.cli.commands.wording import counted, duration, mebibytes, size

TIMEOUT_S = 10.0
PROXIES = {"haproxy": "HAProxy", "ray": "Ray Serve's own proxy"}
NAME_WIDTH = 10


def info(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Print what the server runs: version, model, replicas with their KV pools and tiers, limits, front ends.

    Only operators see replicas and limits: if the server has keys, pass an operator's with --api-key.
    """
    with one_line_errors("info"), server_at(url, api_key, timeout=TIMEOUT_S) as client:
        facts = gather_facts(client)
    if as_json:
        typer.echo(json.dumps(facts.document(), indent=2))
        return
    console = output(highlight=False)
    for name, value in _about(facts):
        console.print(f"{name:<{NAME_WIDTH}}{value}", markup=False, soft_wrap=True)
    if facts.replicas:
        console.print()
        console.print(_table(facts))


def _about(facts: ServerFacts) -> Iterator[tuple[str, str]]:
    yield "kedge", f"{facts.version} at {facts.url}, {'healthy' if facts.healthy else 'NOT healthy'}"
    for model in facts.models[:1]:
        others = facts.models[1:]
        aliases = ", ".join(str(other["id"]) for other in others if other.get("parent") is None)
        adapters = ", ".join(str(other["id"]) for other in others if other.get("parent") is not None)
        context = model.get("max_model_len")
        length = "" if context is None else f", a context of {context:,} tokens"
        yield "model", f"{model['id']}{length}{', also called ' + aliases if aliases else ''}"
        if adapters:
            yield "adapters", adapters
    if facts.refusal is not None:
        yield "note", facts.refusal
        return
    if facts.ingresses:
        proxy = PROXIES.get(facts.proxy or "", "a proxy")
        yield "front", f"{counted(len(facts.ingresses), 'front end')} behind {proxy}"
    limits = facts.limits
    if limits["max_running"] is not None:
        running, waiting = limits["max_running"], limits["max_waiting"]
        yield "limits", f"each replica: {running:,} turns that run, {waiting:,} that wait"
        idle = duration(float(limits["session_idle_timeout_s"]))
        yield "", f"{limits['max_sessions']:,} sessions, which end after {idle} idle"
        yield "", f"each tenant: {_tenants(limits)}"


def _tenants(limits: dict[str, Any]) -> str:
    prefix = "tenant_max_"
    set_ones = {
        name: value for name, value in limits.items() if name.startswith(prefix) and value is not None
    }
    named = (f"{value:,} {name.removeprefix(prefix).replace('_', ' ')}" for name, value in set_ones.items())
    return ", ".join(named) or "no limit of its own"


def _table(facts: ServerFacts) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("replica", overflow="fold")
    table.add_column("state")
    for name in ("sessions", "run", "wait"):
        table.add_column(name, justify="right")
    table.add_column("KV pool")
    table.add_column("in use", justify="right")
    table.add_column("host")
    if has_disk := any(replica["disk"]["budget_bytes"] for replica in facts.replicas):
        table.add_column("disk")
    for replica in facts.replicas:
        tiers = [_tier(replica["host"]), *([_tier(replica["disk"])] if has_disk else [])]
        cells = [replica["replica_id"], state_of(replica)]
        cells += [f"{replica[name]:,}" for name in ("sessions", "running", "waiting")]
        pools = pools_of(replica)
        for name, pages in pools.items():
            pool = size(pages["total"] * pages["page_bytes"])
            if len(pools) > 1:
                pool = f"{name} {pool}"  # alone, "full" would be read as a pool that has no room
            used = 1 - (pages["free"] + pages["cached"]) / max(pages["total"], 1)  # cached: evictable
            table.add_row(*map(str, cells), pool, f"{used:.0%}", *tiers)
            cells, tiers = [""] * len(cells), [""] * len(tiers)
    return table


def _tier(accounts: dict[str, int]) -> str:
    return mebibytes(accounts["used_bytes"], accounts["budget_bytes"])
