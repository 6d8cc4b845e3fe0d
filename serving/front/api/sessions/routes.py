"""Kedge's own calls on sessions: list, open, read back, fork, rewind, move, close."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import Response
from msgspec.structs import asdict
from pydantic import Field, model_validator

from controllers.session_keys import session_key
from serving.front.api.dependencies import OPERATORS_ONLY, Client, Service, Tenant
from serving.front.api.errors import refusal
from serving.front.api.fields import Count, CountOrZero, Name, SessionName
from serving.front.api.service import TurnService
from serving.front.api.sessions.trees import close_tree
from serving.front.api.strict_json import StrictBody, StrictJsonRoute
from serving.keys import ANYBODY
from serving.logs.audit_log import audit_event
from serving.settings.strict_settings import is_name
from serving.wire.transcripts import conversation_of
from serving.wire.tree_ids import node_id, told_session
from serving.wire.turns import ServiceError, TurnTranscript

MOST_IN_PAGE = 1000
"""Most sessions in a page, and the default: a page blocks the controller's loop and this one's for some ms."""
MAX_CURSOR_CHARS = 1024
LAST_TURNS = 5
"""How many turns an error names if the turn that was asked for does not exist."""

PageSize = Annotated[int, Query(ge=1, le=MOST_IN_PAGE)]
Cursor = Annotated[str, Query(max_length=MAX_CURSOR_CHARS)]
Timeout = Annotated[float, Field(gt=0, le=1e9)]


RequestOfTree = Annotated[Name | None, Query()]


async def _named_by_client(session_id: Annotated[str, Path()]) -> str:
    """Refuses what is no name: no session can have it, but it could be the key of another tenant's session, or the
    internal id of a tree's request. Clients name the tree, and the request by `rid`."""
    if not is_name(session_id):
        raise _unknown()
    return session_id


SessionId = Annotated[str, Depends(_named_by_client)]


class NewSession(StrictBody):
    """The session ends after `timeout_s` idle seconds, and may hold at most `capacity_tokens` tokens."""

    session_id: SessionName | None = None
    timeout_s: Timeout | None = None
    capacity_tokens: Count | None = None


class NewFork(StrictBody):
    """The fork begins with the first `length` committed tokens of the session, or with its turns up to and including
    `turn`, or, without both, with all of it. Without `timeout_s` it gets the session's own."""

    new_session_id: SessionName | None = None
    length: CountOrZero | None = None
    turn: CountOrZero | None = None
    timeout_s: Timeout | None = None

    @model_validator(mode="after")
    def _names_one_place(self) -> NewFork:
        if self.length is not None and self.turn is not None:
            raise ValueError("length and turn are two ways to say one thing: send one of them")
        return self


class Rewind(StrictBody):
    """The session keeps its first `length` tokens, or its turns up to and including `turn`. Send one of the two."""

    length: CountOrZero | None = None
    turn: CountOrZero | None = None

    @model_validator(mode="after")
    def _names_one_place(self) -> Rewind:
        if (self.length is None) == (self.turn is None):
            raise ValueError("send either length (tokens) or turn (a turn's number)")
        return self


class Move(StrictBody):
    """`to` is the replica that will own the session. Without it, the controller picks another replica."""

    to: Name | None = None


def routes() -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute, tags=["sessions"])
    router.add_api_route("/v1/kedge/sessions", list_sessions, methods=["GET"])
    router.add_api_route("/v1/kedge/sessions", create_session, methods=["POST"], status_code=201)
    router.add_api_route("/v1/kedge/sessions/{session_id:path}", get_session, methods=["GET"])
    router.add_api_route(
        "/v1/kedge/sessions/{session_id:path}", delete_session, methods=["DELETE"], status_code=204
    )
    router.add_api_route("/v1/kedge/sessions/{session_id:path}/fork", fork_session, methods=["POST"])
    router.add_api_route("/v1/kedge/sessions/{session_id:path}/rewind", rewind_session, methods=["POST"])
    router.add_api_route(
        "/v1/kedge/sessions/{session_id:path}/move",
        move_session,
        methods=["POST"],
        dependencies=OPERATORS_ONLY,
    )
    return router


async def list_sessions(
    service: Service,
    caller: Client,
    tenant: Tenant,
    limit: PageSize = MOST_IN_PAGE,
    after: Cursor | None = None,
) -> dict[str, Any]:
    """The tenant's sessions; an operator who names no tenant gets all. `next` is the `after` of the next page; null:
    this is the last one."""
    everybodys = caller.operator and not tenant
    found = await service.sessions(tenant=None if everybodys else tenant, after=after, limit=limit + 1)
    page = found[:limit]
    more = session_key(page[-1].tenant, page[-1].session_id) if len(found) > limit else None
    return {"sessions": [told_session(session) for session in page], "next": more}


async def create_session(body: NewSession, service: Service, tenant: Tenant) -> dict[str, str]:
    session_id = await service.open_session(
        body.session_id, timeout_s=body.timeout_s, capacity_tokens=body.capacity_tokens, tenant=tenant
    )
    return {"session_id": session_id}


async def get_session(
    session_id: SessionId,
    service: Service,
    tenant: Tenant,
    messages: bool = False,
    rid: RequestOfTree = None,
) -> dict[str, Any]:
    """The session. With `messages`: also its messages and checkpoints, which say how many messages and tokens there
    were at the end of each turn. `rid`: a request of the session, which is a tree."""
    if rid is not None:
        session_id = node_id(session_id, rid)
    session = await service.session(session_id, tenant=tenant)
    if session is None:
        raise _unknown()
    if not messages:
        return told_session(session)
    turns = await service.transcript(session_id, tenant=tenant)
    said, ends = conversation_of(turns)
    checkpoints = [
        {"turn": _number(turn), "messages": count, "tokens": turn.end_len}
        for turn, count in zip(turns, ends, strict=True)
    ]
    return told_session(session) | {"messages": said, "checkpoints": checkpoints}


async def fork_session(
    session_id: SessionId, body: NewFork, service: Service, tenant: Tenant
) -> dict[str, Any]:
    length = body.length
    if body.turn is not None:
        length = await _end_of(session_id, body.turn, service, tenant)
    forked = await service.fork_session(
        session_id, body.new_session_id, length=length, timeout_s=body.timeout_s, tenant=tenant
    )
    return asdict(forked)


async def rewind_session(
    session_id: SessionId, body: Rewind, service: Service, tenant: Tenant
) -> dict[str, Any]:
    length = body.length
    if body.turn is not None:
        length = await _end_of(session_id, body.turn, service, tenant)
    assert length is not None
    await service.rewind_session(session_id, length, tenant=tenant)
    return {"session_id": session_id, "tokens": length}


async def move_session(session_id: SessionId, body: Move, service: Service, tenant: Tenant) -> dict[str, Any]:
    moved = await service.move_session(session_id, body.to, tenant=tenant)
    audit_event("session_moved", session_id=session_id, tenant=tenant, replica_id=moved.replica_id)
    return {
        "session_id": session_id,
        "from": moved.from_id,
        "to": moved.replica_id,
        "epoch": moved.epoch,
        "moved": moved.from_id != moved.replica_id,
    }


async def delete_session(session_id: SessionId, service: Service, caller: Client, tenant: Tenant) -> Response:
    closed = await service.close_session(session_id, tenant=tenant)
    await close_tree(service, session_id, tenant)
    if not closed:
        raise _unknown()
    if caller.operator and caller is not ANYBODY:
        audit_event("session_closed_by_operator", session_id=session_id, tenant=tenant)
    return Response(status_code=204)


async def _end_of(session_id: str, turn_index: int, service: TurnService, tenant: str) -> int:
    """How many tokens the session had at the end of the turn. Raises ServiceError if there is no such whole turn."""
    turns = await service.transcript(session_id, tenant=tenant)
    ends = {turn.turn_index: turn.end_len for turn in turns if turn.turn_index >= 0 and not turn.is_cut}
    if turn_index in ends:
        return ends[turn_index]
    known = ", ".join(map(str, list(ends)[-LAST_TURNS:])) or "none"
    raise refusal(
        f"turn: the history of this session has no whole turn {turn_index}. Its last whole turns: {known}.",
        "turn",
        code="turn_not_found",
    )


def _number(turn: TurnTranscript) -> int | None:
    """The turn's number; None for a turn of a fork's parent, which has no number in the fork."""
    return turn.turn_index if turn.turn_index >= 0 else None


def _unknown() -> ServiceError:
    return refusal("This session does not exist.", "session_id", status=404, code="session_not_found")
