"""What clients see of an ingress: the service that the HTTP protocols use, with errors as data."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from serving.front.api.service import TurnService
from serving.wire.turns import ErrorInfo, ForkedSession, MovedSession, ServiceError, TurnCall, TurnEvent


class Web:
    """The service of one ingress. A client that leaves cancels what runs here."""

    def __init__(self, service: TurnService) -> None:
        self._service = service

    async def turn(self, call: TurnCall) -> AsyncGenerator[TurnEvent | ErrorInfo, None]:
        try:
            async with self._service.run(call) as events:
                async for event in events:
                    yield event
        except ServiceError as error:
            yield error.info

    async def open_session(self, session_id: str) -> str | ErrorInfo:
        try:
            return await self._service.open_session(
                session_id, timeout_s=None, capacity_tokens=None, tenant=""
            )
        except ServiceError as error:
            return error.info

    async def fork(self, session_id: str, child_id: str, length: int) -> ForkedSession | ErrorInfo:
        try:
            return await self._service.fork_session(
                session_id, child_id, length=length, timeout_s=None, tenant=""
            )
        except ServiceError as error:
            return error.info

    async def rewind(self, session_id: str, length: int) -> bool | ErrorInfo:
        try:
            await self._service.rewind_session(session_id, length, tenant="")
        except ServiceError as error:
            return error.info
        return True

    async def close(self, session_id: str) -> bool | ErrorInfo:
        try:
            return await self._service.close_session(session_id, tenant="")
        except ServiceError as error:
            return error.info

    async def move(self, session_id: str, to: str | None) -> MovedSession | ErrorInfo:
        try:
            return await self._service.move_session(session_id, to, tenant="")
        except ServiceError as error:
            return error.info

    async def drain(self, replica_id: str) -> ErrorInfo | None:
        try:
            await self._service.drain_replica(replica_id)
        except ServiceError as error:
            return error.info
        return None

    async def abort(self, request_id: str) -> None:
        await self._service.abort(request_id, tenant="")
