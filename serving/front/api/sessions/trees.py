"""Sessions that are trees of requests, as in SGLang: each request goes on from an earlier one, or begins anew.

Each request of a tree is a session of its own, with one turn: a fork of the request that it goes on from. So several
requests can go on from the same one at once, KV is shared, and the tree survives the loss of a replica. The tree itself
is a session without history. The tree's idle timeout counts from the last request that began anew, a request's from the
last request that went on from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from controllers.session_keys import session_key
from serving.front.api.errors import refusal
from serving.front.api.service import TurnService
from serving.front.api.sessions.schema import SessionParams
from serving.front.api.unused_sessions import FINISHED_TURNS, run_first_turn
from serving.wire.errors import ANOTHERS_TURN, SESSION_CLOSING, SESSION_NOT_FOUND
from serving.wire.tree_ids import BEHIND_TREE, node_id
from serving.wire.turns import ServiceError, SessionTurn, TurnCall, TurnEvent

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 256
_DROP_TIMEOUT_S = 30.0
_ANOTHERS = ANOTHERS_TURN | {SESSION_CLOSING, SESSION_NOT_FOUND}
"""Errors that say that a node is not this request's: another request of the same name has it, or had it."""


class TreeRequest:
    """A request of a tree, `rid`. First `begin` makes its session and gives its turn, then `run` runs it.

    The session of a failed request is closed, unless the request has an idempotency key: then it may have been
    committed or run for an earlier try, so it is left to the next try and to its idle timeout.

    With `replace`, the requests that went on from the same one before are dropped once this one is committed. A request
    that is refused or aborted drops nothing, and neither does one whose answer is repeated."""

    def __init__(self, service: TurnService, params: SessionParams, rid: str, tenant: str) -> None:
        self._service = service
        self._params = params
        self._rid = rid
        self._node = node_id(params.id, rid)
        self._tenant = tenant
        self._before: frozenset[str] = frozenset()
        """The requests of the tree when this one began, if it replaces any."""
        self._replaced: set[str] = set()
        """Those of them that are still to be dropped."""

    async def begin(self, key: str | None) -> SessionTurn:
        """Makes the request's session, and returns its turn. Raises ServiceError, which names the field."""
        service, params, tenant = self._service, self._params, self._tenant
        note = f"{params.rid or ''}{BEHIND_TREE}{self._rid}".encode()
        turn = SessionTurn(self._node, idempotency_key=key, create=False, expected_turn=0, note=note)
        if key is not None and await _is_finished(service, self._node, tenant):
            # An earlier try's answer is repeated. If it is another request's, the turn is refused.
            return turn
        parent = params.id if not params.rid else node_id(params.id, params.rid)
        if params.rid and not await _is_finished(service, parent, tenant):
            raise refusal(
                f"session_params.rid: Invalid request session id: session {params.id!r} has no finished request "
                f"{params.rid!r}.",
                "session_params.rid",
            )
        if params.replace:
            await self._find_replaced()
        length = await _kept_len(service, params, parent, tenant)
        await _fork(service, parent, self._node, length, tenant, may_be_there=key is not None)
        return turn

    @asynccontextmanager
    async def run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        assert call.session is not None
        has_key = call.session.idempotency_key is not None
        turn = self._service.run(call) if has_key else run_first_turn(self._service, call)
        committed = False

        async def watched(events: AsyncIterator[TurnEvent]) -> AsyncIterator[TurnEvent]:
            nonlocal committed
            async for event in events:
                committed = event.is_committed
                if committed:
                    await self._drop_replaced()  # before the client hears of the end
                yield event

        try:
            async with turn as events:
                yield watched(events)
        finally:
            if committed:
                await self._drop_replaced()  # what is left, if the client has gone meanwhile

    async def _find_replaced(self) -> None:
        """Notes which requests went on from the same one, directly or not; without that, all of the tree."""
        service, params, tenant = self._service, self._params, self._tenant
        nodes = set(await _nodes(service, params.id, tenant)) - {self._node}
        self._before = frozenset(nodes)
        if params.rid:
            parents = {node: await _parent_of(service, params.id, node, tenant) for node in nodes}
            nodes = _behind({node_id(params.id, params.rid)}, parents)
        self._replaced = nodes

    async def _drop_replaced(self) -> None:
        """Closes the replaced requests, and those that have gone on from them meanwhile. The turn is committed: an
        error only leaves them to their idle timeout."""
        if not self._replaced:
            return
        service, tree_id, tenant = self._service, self._params.id, self._tenant
        try:
            async with asyncio.timeout(_DROP_TIMEOUT_S):
                later = set(await _nodes(service, tree_id, tenant)) - self._before - {self._node}
                parents = {node: await _parent_of(service, tree_id, node, tenant) for node in later}
                for node in self._replaced | _behind(self._replaced, parents):
                    await service.close_session(node, tenant=tenant)
        except (ServiceError, TimeoutError) as error:
            logger.warning("what request %s replaced is left to its idle timeout: %r", self._rid, error)
        self._replaced = set()


async def close_tree(service: TurnService, tree_id: str, tenant: str) -> None:
    """Closes all requests of a tree, if it has any. The caller closes the tree itself."""
    for node in await _nodes(service, tree_id, tenant):
        await service.close_session(node, tenant=tenant)


async def _is_finished(service: TurnService, node: str, tenant: str) -> bool:
    session = await service.session(node, tenant=tenant)
    return session is not None and session.turns >= FINISHED_TURNS and not session.in_turn


async def _kept_len(service: TurnService, params: SessionParams, parent: str, tenant: str) -> int | None:
    """How many tokens of its parent the request goes on from: all (None), or as many as its client asks for."""
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
    """Makes `node` as a fork of `parent`. `may_be_there`: the request has a key, so the node may be that of an earlier
    try, whose answer is repeated."""
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
    """Whether the node was left by a request that came to nothing. If so, it is the caller's now: the note takes the
    place of the first turn, so no other turn can have it. The owner decides this, because the ledger learns of turns in
    flight only later."""
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


def _behind(roots: Iterable[str], parents: dict[str, str | None]) -> set[str]:
    """All nodes that went on from the roots, directly or not. `parents`: which node each one went on from."""
    found: set[str] = set()
    newest = set(roots)
    while newest:
        newest = {node for node, parent in parents.items() if parent in newest} - found
        found |= newest
    return found


async def _parent_of(service: TurnService, tree_id: str, node: str, tenant: str) -> str | None:
    """The node that `node` went on from; None if it began anew or is gone. A turn's note names its own request and the
    one that it went on from. While the node's turn is in flight, it has only turns of its ancestors: the last is its
    parent's."""
    try:
        turns = await service.transcript(node, tenant=tenant)
    except ServiceError as error:
        if error.info.code != SESSION_NOT_FOUND:
            raise
        return None
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
