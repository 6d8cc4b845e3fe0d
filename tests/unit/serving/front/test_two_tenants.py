"""Random calls by two tenants and an operator at one server. No tenant reads, changes or learns of anything of the
other, the operator changes nothing of either, and the logs contain nothing that was said.

KEDGE_FUZZ_CALLS=10000 makes it longer.
"""

from __future__ import annotations

import logging
import os
import random
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from controllers.session_keys import session_key
from serving.keys import API_KEYS, OPERATOR_KEYS, KeyRing
from tests.unit.serving.local_service import LocalService

CALLS = int(os.environ.get("KEDGE_FUZZ_CALLS", "600"))
OTHER = {"acme": "umbrella", "umbrella": "acme"}
RING = KeyRing({API_KEYS: "key-a=acme,key-u=umbrella", OPERATOR_KEYS: "key-o"})
KEYS = {"acme": "key-a", "umbrella": "key-u", "operator": "key-o"}
SESSIONS = "/v1/kedge/sessions"
COMMON_IDS = ("s", "t")
"""Session ids that both tenants use."""
COMMON_KEYS = ("k", "l", "m")
FOR_OPERATORS = (
    ("GET", "/v1/kedge/audit"),
    ("GET", "/v1/kedge/watch?count=1"),
    ("GET", "/get_server_info"),
    ("GET", "/server_info"),
    ("GET", "/get_load"),
    ("POST", "/flush_cache"),
    ("POST", "/v1/kedge/replicas/a/drain"),
)


@dataclass
class Tenant:
    """One tenant. `secrets` are words that only it has said and ids that only it has used. `said` are the words."""

    name: str
    rng: random.Random
    own_ids: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def secret(self) -> str:
        word = uuid.UUID(int=self.rng.getrandbits(128)).hex
        self.secrets = [*self.secrets, word][-40:]
        return word

    def own_id(self) -> str:
        if not self.own_ids or self.rng.random() < 0.2:
            self.own_ids = [*self.own_ids, self.secret()][-6:]
        return self.rng.choice(self.own_ids)


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    headers: dict[str, str]
    body: Any = None

    async def send(self, client: httpx.AsyncClient, tenant: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEYS[tenant]}"} | self.headers
        return await client.request(self.method, self.path, json=self.body, headers=headers)


def some_call(tenant: Tenant, session_id: str) -> Call:
    """A random call. If the call is about a session, it is about `session_id`."""
    rng = tenant.rng
    headers = {"x-session-id": session_id} if rng.random() < 0.8 else {}
    if rng.random() < 0.5:
        headers["idempotency-key"] = rng.choice(COMMON_KEYS)
    if rng.random() < 0.1:
        headers["x-tenant-id"] = tenant.name
    said, stream = f"{tenant.secret()} ", rng.random() < 0.3
    tenant.said.append(said.strip())
    match rng.choice(
        ("chat", "completions", "generate", "open", "close", "new", "get", "delete", "fork", "abort")
    ):
        case "chat":
            message = {"role": "user", "content": said}
            body = {"messages": [message], "max_tokens": 2, "stream": stream}
            return Call("POST", "/v1/chat/completions", headers, body)
        case "completions":
            return Call(
                "POST", "/v1/completions", headers, {"prompt": said, "max_tokens": 2, "stream": stream}
            )
        case "generate":
            params = {"max_new_tokens": 2}
            body = {"text": said, "sampling_params": params, "session_params": {"id": session_id}}
            return Call("POST", "/generate", {}, body)
        case "open":
            return Call(
                "POST",
                "/open_session",
                {},
                {"capacity_of_str_len": 9, "streaming": True, "session_id": session_id},
            )
        case "close":
            return Call("POST", "/close_session", {}, {"session_id": session_id})
        case "new":
            return Call("POST", SESSIONS, {}, {"session_id": session_id})
        case "get":
            return Call("GET", f"{SESSIONS}/{session_id}", {})
        case "delete":
            return Call("DELETE", f"{SESSIONS}/{session_id}", {})
        case "fork":
            return Call("POST", f"{SESSIONS}/{session_id}/fork", {}, {"new_session_id": tenant.own_id()})
        case _:
            return Call("POST", "/abort_request", {}, {"abort_all": True})


@pytest.fixture
def app_options() -> dict[str, Any]:
    return {"keys": RING}


def state_of(service: LocalService, tenant: str) -> list[Any]:
    """Everything that the ledger and the log have of the tenant, except what replicas report."""
    cluster = service.cluster
    own = sorted((e for e in cluster.sessions() if e.tenant == tenant), key=lambda entry: entry.session_id)
    ledger = [
        replace(entry, last_used_s=0.0, reported_s=None, used_since_report=False, in_turn=False, size_bytes=0)
        for entry in own
    ]
    return [ledger, *(cluster._store.load(entry.session_id) for entry in own)]


@pytest.mark.slow
async def test_two_tenants_know_nothing_of_each_other(
    client: httpx.AsyncClient,
    service: LocalService,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.INFO)
    seed = random.randrange(2**31)
    print(f"seed {seed}")  # noqa: T201
    rng = random.Random(seed)
    tenants = {name: Tenant(name, random.Random(f"{seed}-{name}")) for name in OTHER}
    answered = 0
    for _ in range(CALLS):
        tenant = tenants[rng.choice(sorted(tenants))]
        other = tenants[OTHER[tenant.name]]
        before = state_of(service, other.name)
        kind = rng.random()
        if kind < 0.6:
            reply = await some_call(tenant, rng.choice((*COMMON_IDS, tenant.own_id()))).send(
                client, tenant.name
            )
            answered += reply.status_code == 200
        elif kind < 0.8:
            reply = await _as_of_nobody(client, service, tenant, other)
        elif kind < 0.85:
            reply = await _as_an_operator(client, service, rng)
        elif kind < 0.9:
            method, path = rng.choice(FOR_OPERATORS)
            reply = await Call(method, path, {}).send(client, tenant.name)
            assert reply.status_code == 403, path
        else:
            naming = {"x-tenant-id": other.name}
            call = some_call(tenant, rng.choice(COMMON_IDS))
            reply = await replace(call, headers=call.headers | naming).send(client, tenant.name)
            assert reply.json()["error"]["code"] == "tenant_not_allowed"
        assert reply.status_code < 500, reply.text
        assert state_of(service, other.name) == before, f"{reply.request.method} {reply.request.url.path}"
        if kind < 0.6:
            told = reply.text + (await Call("GET", SESSIONS, {}).send(client, tenant.name)).text
            assert not [secret for secret in other.secrets if secret in told]
    assert answered > CALLS / 10
    never_logged = {*KEYS.values(), str(tmp_path), *tenants["acme"].said, *tenants["umbrella"].said}
    assert not [word for word in never_logged if word in caplog.text]


async def _as_an_operator(
    client: httpx.AsyncClient, service: LocalService, rng: random.Random
) -> httpx.Response:
    """Reads everything and clears the caches, which changes no tenant's sessions."""
    before = [state_of(service, tenant) for tenant in OTHER]
    method, path = rng.choice(
        (*FOR_OPERATORS[:-1], ("GET", SESSIONS), ("GET", "/metrics"), ("GET", "/health"))
    )
    reply = await Call(method, path, {}).send(client, "operator")
    assert reply.status_code == 200, (path, reply.text)
    assert [state_of(service, tenant) for tenant in OTHER] == before, path
    return reply


async def _as_of_nobody(
    client: httpx.AsyncClient, service: LocalService, tenant: Tenant, other: Tenant
) -> httpx.Response:
    """A call about the other tenant's session gets the same reply as a call about a session that never existed."""
    theirs = [entry.session_id for entry in service.cluster.sessions() if entry.tenant == other.name]
    known = {session_key(other.name, each) for each in other.own_ids}
    session_id = tenant.rng.choice([key.rpartition(" ")[2] for key in theirs if key in known] or ["none"])
    state = tenant.rng.getstate()
    call = some_call(tenant, session_id)
    tenant.rng.setstate(state)
    nobodys = some_call(tenant, unused := f"unused-{uuid.uuid4().hex}")
    replies = [await each.send(client, tenant.name) for each in (nobodys, call)]
    codes = [(reply.status_code, _code(reply)) for reply in replies]
    assert codes[0] == codes[1], f"{call.method} {call.path}"
    for each in (unused, session_id):
        await Call("POST", "/close_session", {}, {"session_id": each}).send(client, tenant.name)
    return replies[1]


def _code(reply: httpx.Response) -> str | None:
    if reply.status_code < 400:
        return None
    code: str = reply.json()["error"]["code"]
    return code
