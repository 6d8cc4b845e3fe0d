"""Sessions that are trees of requests, as SGLang has them: each request goes on from an earlier one, or begins anew.

Each request of a tree is a session of its own, with one turn: a fork of the one that it goes on from. So several may go
on from the same at once, KV is shared, and what a tree has survives its replica. The tree itself is a session without
history. Its own idle timeout counts from its last request that began anew, that of a request from the last one that
went on from it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import asdict

from controllers.session_keys import session_key
from serving.front.api.errors import refusal
from serving.front.api.sessions.schema import SessionParams
from serving.front.api.unused_sessions import FINISHED_TURNS, run_first_turn
from serving.wire.errors import ANOTHERS_TURN, SESSION_CLOSING, SESSION_NOT_FOUND
from serving.wire.turns import (
    ServiceError,
    SessionInfo,
    SessionTurn,
    TurnCall,
    TurnEvent,
    TurnService,
)

BEHIND_TREE = "\x1f"
"""Between a tree's name and a request's: no client's name has it."""
MOST_AT_ONCE = 256
_ANOTHERS = ANOTHERS_TURN | {SESSION_CLOSING, SESSION_NOT_FOUND}
"""A request hears so of a node that is not there for it: another of its name has it, or had."""


async def begin_request(
    service: TurnService, params: SessionParams, rid: str, key: str | None, tenant: str
) -> SessionTurn:
    """The turn of a request of a tree, which is `rid` from then on. Raises ServiceError, which names the field."""
    parent = params.id if not params.rid else node_id(params.id, params.rid)
    if params.rid:
        await _check_finished(service, params, tenant)
    if params.replace:
        await _drop_behind(service, params.id, params.rid or None, tenant)
    length = await _kept_len(service, params, parent, tenant)
    node = node_id(params.id, rid)
    await _fork(service, parent, node, length, tenant, may_be_there=key is not None)
    note = f"{params.rid or ''}{BEHIND_TREE}{rid}".encode()
    return SessionTurn(node, idempotency_key=key, create=False, expected_turn=0, note=note)


class TreeRequests:
    """Runs requests of a tree. What has a key is left to whoever asks again under it, and to its idle timeout: it may
    have been committed, or run for an earlier try."""

    def __init__(self, service: TurnService) -> None:
        self._service = service

    @asynccontextmanager
    async def run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        assert call.session is not None
        has_key = call.session.idempotency_key is not None
        turn = self._service.run(call) if has_key else run_first_turn(self._service, call)
        async with turn as events:
            yield events


def node_id(tree_id: str, rid: str) -> str:
    """What the cluster calls the session of a tree's request."""
    return f"{tree_id}{BEHIND_TREE}{rid}"


def told_session(session: SessionInfo) -> dict[str, Any]:
    """As its client knows it. `rid` is null for what is no request of a tree."""
    session_id, rid = tree_and_request(session.session_id)
    return asdict(session) | {"session_id": session_id, "rid": rid}


def tree_and_request(session_id: str) -> tuple[str, str | None]:
    """The session as its client knows it, and which request of that this is: None for what is no node of a tree."""
    tree_id, behind, rid = session_id.partition(BEHIND_TREE)
    return tree_id, rid if behind else None


async def close_tree(service: TurnService, tree_id: str, tenant: str) -> None:
    """Closes all of its requests, if it has any. It itself is its caller's to close."""
    for node in await _nodes(service, tree_id, tenant):
        await service.close_session(node, tenant=tenant)


async def _check_finished(service: TurnService, params: SessionParams, tenant: str) -> None:
    assert params.rid is not None
    session = await service.session(node_id(params.id, params.rid), tenant=tenant)
    if session is None or session.turns < FINISHED_TURNS or session.in_turn:
        raise refusal(
            f"session_params.rid: Invalid request session id: session {params.id!r} has no finished request "
            f"{params.rid!r}.",
            "session_params.rid",
        )


async def _kept_len(service: TurnService, params: SessionParams, parent: str, tenant: str) -> int | None:
    """How many tokens the request goes on from: all (None), or fewer, as its client asks for."""
    if not params.rid:
        return 0
    offset = params.offset or None
    if not params.drop_previous_output and (offset is None or offset > 0):
        return offset
    turn = (await service.transcript(parent, tenant=tenant))[-1]
    most = turn.asked_len if params.drop_previous_output else turn.end_len
    if offset is None:
        return most
    return min(offset, most) if offset > 0 else max(0, most + offset)


async def _fork(
    service: TurnService, parent: str, node: str, length: int | None, tenant: str, *, may_be_there: bool
) -> None:
    """`may_be_there`: the request has a key, under which a finished one is answered again."""
    while True:
        try:
            await service.fork_session(parent, node, length=length, timeout_s=None, tenant=tenant)
        except ServiceError as error:
            match error.info.code:
                case "session_exists" if await _left_over(service, node, tenant):
                    await service.close_session(node, tenant=tenant)
                case "session_exists" if may_be_there:
                    return
                case "session_exists":
                    raise refusal("rid: this session has a request of that id.", "rid") from error
                case "invalid_fork":
                    param = "session_params.offset"
                    raise refusal(f"{param}: {error.info.message}", param) from error
                case _:
                    raise
        else:
            return


async def _left_over(service: TurnService, node: str, tenant: str) -> bool:
    """Whether it is what a request has left that came to nothing. The node is its caller's then: no turn of another can
    be the first any more. Its owner says so, for the ledger hears of turns in flight only later."""
    session = await service.session(node, tenant=tenant)
    if session is None or session.turns >= FINISHED_TURNS or session.in_turn:
        return False
    try:
        await service.keep_note(node, b"", expected_turn=0, tenant=tenant)
    except ServiceError as error:
        if error.info.code not in _ANOTHERS:
            raise
        return error.info.code == SESSION_NOT_FOUND
    return True


async def _drop_behind(service: TurnService, tree_id: str, rid: str | None, tenant: str) -> None:
    """Closes what went on from the request, and from that; without a name all requests."""
    nodes = await _nodes(service, tree_id, tenant)
    gone = set(nodes)
    if rid is not None:
        parents = {node: await _parent_of(service, tree_id, node, tenant) for node in nodes}
        gone = _behind(node_id(tree_id, rid), parents)
    for node in gone:
        await service.close_session(node, tenant=tenant)


def _behind(root: str, parents: dict[str, str | None]) -> set[str]:
    """All that went on from the root, by what each node went on from."""
    found: set[str] = set()
    newest = {root}
    while newest:
        newest = {node for node, parent in parents.items() if parent in newest} - found
        found |= newest
    return found


async def _parent_of(service: TurnService, tree_id: str, node: str, tenant: str) -> str | None:
    """A turn's note names the request that it went on from, and its own. One in flight has only the turns of those
    before it."""
    turns = await service.transcript(node, tenant=tenant)
    if not turns:
        return None
    gone_on_from, _, own = turns[-1].said.note.decode().partition(BEHIND_TREE)
    rid = gone_on_from if turns[-1].turn_index >= 0 else own
    return node_id(tree_id, rid) if rid else None


async def _nodes(service: TurnService, tree_id: str, tenant: str) -> list[str]:
    """All requests of the tree."""
    prefix = tree_id + BEHIND_TREE
    nodes: list[str] = []
    after = session_key(tenant, prefix)
    while True:
        page = await service.sessions(tenant=tenant, after=after, limit=MOST_AT_ONCE)
        own = [each.session_id for each in page if each.session_id.startswith(prefix)]
        nodes += own
        if len(own) < MOST_AT_ONCE:
            return nodes
        after = session_key(tenant, own[-1])
