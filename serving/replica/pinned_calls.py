"""PinnedCalls: front ends' calls to this replica, except for turns. Each is carried out by the part that owns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.api import Engine, EngineError
from serving.replica.drain import ReplicaDrain
from serving.replica.empty_turns import EmptyTurns
from serving.replica.engine_answers import answered
from serving.replica.kv_watch import KVWatch
from serving.replica.ordered_moves import OrderedMoves
from serving.replica.session_host import SessionHost
from serving.replica.turn_request import RequestBuilder
from serving.replica.turn_runner import TurnRunner
from serving.replica.unnamed_sessions import UnnamedSessions
from serving.watch.audit_reply import failed_audit, replica_audit
from serving.watch.metrics import ReplicaMetrics
from serving.wire.calls import (
    Abort,
    AnyCall,
    Audit,
    CloseSession,
    Describe,
    Detokenize,
    Drain,
    Flush,
    ForkSession,
    GetModelInfo,
    KeepNote,
    MetricsText,
    MoveSession,
    PlantFault,
    RewindSession,
    SessionPlaces,
    Tokenize,
)
from serving.wire.turns import ErrorInfo, ModelInfo, ServiceError

if TYPE_CHECKING:
    from serving.debug.replica_faults import ReplicaFaults


class PinnedCalls:
    """Carries them out, on the replica's event loop. `describe` and `model_info` tell what GET /get_server_info and GET
    /v1/models show. Without `faults`, none can be planted."""

    def __init__(
        self,
        replica_id: str,
        engine: Engine,
        *,
        host: SessionHost,
        turns: TurnRunner,
        empty_turns: EmptyTurns,
        moves: OrderedMoves,
        unnamed: UnnamedSessions,
        drain: ReplicaDrain,
        builder: RequestBuilder,
        kv_watch: KVWatch,
        metrics: ReplicaMetrics,
        describe: Callable[[], dict[str, Any]],
        model_info: Callable[[], ModelInfo],
        faults: ReplicaFaults | None,
    ) -> None:
        self._replica_id = replica_id
        self._engine = engine
        self._host = host
        self._turns = turns
        self._empty_turns = empty_turns
        self._moves = moves
        self._unnamed = unnamed
        self._drain = drain
        self._builder = builder
        self._kv_watch = kv_watch
        self._metrics = metrics
        self._describe = describe
        self._model_info = model_info
        self._faults = faults

    async def answer(self, call: AnyCall) -> Any:
        """The answer, see serving/wire/calls.py. Raises ControllerError, EngineError, ServiceError or TimeoutError."""
        match call:
            case CloseSession():
                return await self._host.close(call.session_id, call.epoch)
            case ForkSession():
                return await self._host.fork(call.parent_id, call.epoch, call.order)
            case RewindSession():
                return await self._empty_turns.rewind(call)
            case MoveSession():
                return await self._moves.move(call)
            case KeepNote():
                return await self._empty_turns.keep_note(call)
            case Abort():
                return self._turns.abort(call.request_id, call.tenant)
            case Flush():
                self._unnamed.forget_all()
                return await answered(self._engine.flush())
            case Drain():
                return await self._drain.order()
            case Audit():
                return await self._audit()
            case Describe():
                return self._describe()
            case SessionPlaces():
                return await answered(self._engine.session_places(call.session_ids))
            case MetricsText():
                return self._metrics.render()
            case PlantFault():
                return await self._plant_fault(call)
            case GetModelInfo():
                return self._model_info()
            case Tokenize():
                return await self._builder.tokenize(
                    call.prompt, call.add_special_tokens, with_token_strs=call.with_token_strs
                )
            case Detokenize():
                return await self._builder.detokenize(call.token_ids, call.skip_special_tokens)
        raise AssertionError(f"no answer to {type(call).__name__}")

    async def _audit(self) -> dict[str, Any]:
        try:
            report = await self._kv_watch.audit()
        except (EngineError, TimeoutError) as error:
            return failed_audit(self._replica_id, str(error) or "the engine did not answer")
        return replica_audit(self._replica_id, report)

    async def _plant_fault(self, order: PlantFault) -> dict[str, Any]:
        if self._faults is None:
            raise ServiceError(ErrorInfo(403, "no_faults_here", "debug.faults is off", "debug.faults"))
        return await self._faults.plant(order)
