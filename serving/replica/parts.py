"""ReplicaParts: the parts of one replica, made and joined. LLMReplica keeps them running; tests look into them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from cache.audit import PageAccounts
from controllers.served_model import ServedModel
from controllers.session import SessionController
from engine.api import Engine
from serving.background import BackgroundTasks
from serving.grammars.constraints import ConstraintCompiler
from serving.replica.drain import ReplicaDrain
from serving.replica.empty_turns import EmptyTurns
from serving.replica.ending_turns import EndingTurns
from serving.replica.environment import ReplicaEnvironment
from serving.replica.gauges import replica_gauges
from serving.replica.heartbeats import Heartbeats
from serving.replica.kv_watch import KVWatch
from serving.replica.live_turn import EventMaker
from serving.replica.mailbox import Mailbox
from serving.replica.ordered_moves import OrderedMoves
from serving.replica.pinned_calls import PinnedCalls
from serving.replica.session_host import SessionHost
from serving.replica.session_offers import SessionOffers
from serving.replica.tenant_load import TenantLoad
from serving.replica.turn_commits import TurnCommits
from serving.replica.turn_request import RequestBuilder
from serving.replica.turn_runner import TurnRunner
from serving.replica.unnamed_sessions import UnnamedSessions
from serving.settings.config import AppArgs
from serving.text.text import TextProcessor
from serving.trace.opening import replica_traces
from serving.watch.metrics import ReplicaMetrics
from serving.wire.turns import ModelInfo, SamplingDefaults

if TYPE_CHECKING:
    from serving.debug.replica_faults import ReplicaFaults
    from serving.trace.spans import Spans


class Links(Protocol):
    """The connected front ends, counted. `calls` of theirs are under way."""

    @property
    def calls(self) -> int: ...

    def __len__(self) -> int: ...


class ReplicaParts:
    """All parts of one replica, for its event loop only. `model` is what `text` and `engine` serve, `sampling` how it
    wants to be sampled from."""

    def __init__(
        self,
        args: AppArgs,
        environment: ReplicaEnvironment,
        engine: Engine,
        mailbox: Mailbox,
        tasks: BackgroundTasks,
        links: Links,
        *,
        text: TextProcessor,
        constraints: ConstraintCompiler,
        model: ServedModel,
        sampling: SamplingDefaults,
        spans: Spans | None,
    ) -> None:
        self.replica_id = environment.replica_id
        self.engine = engine
        self.tasks = tasks
        self._args = args
        self._environment = environment
        self._links = links
        self._text = text
        self._model = model
        self._sampling = sampling
        self._created = int(environment.unix_clock())
        self.metrics = ReplicaMetrics(
            self.replica_id, engine.stats, args.metric_labels, turn_ended=environment.turn_ended
        )
        self._hold_sessions(environment.clock)
        self.builder = RequestBuilder(engine, text, constraints)
        self.unnamed = UnnamedSessions(environment.clock, args.sessions.unnamed.idle_timeout_s, engine)
        self._run_turns(mailbox, spans)
        self.kv_watch = KVWatch(
            engine,
            self.metrics,
            lambda session_id: self.sessions.epoch(session_id) is not None or session_id in self.unnamed,
            args.metrics,
            clock=environment.clock,
            unix_clock=environment.unix_clock,
        )
        self.metrics.read(replica_gauges(engine, self.sessions, self.unnamed, lambda: len(links)))
        self.calls = self._pinned_calls()

    def _hold_sessions(self, clock: Callable[[], float]) -> None:
        args, controller = self._args, self._environment.controller
        self.sessions = SessionController(
            clock, args.sessions.idle_timeout_s, self._model, make_chain=self.engine.empty_chain
        )
        self.host = SessionHost(
            self.replica_id,
            self.engine,
            self.sessions,
            controller,
            self.tasks,
            on_loaded=self.metrics.session_loaded,
        )
        self.offers = SessionOffers(self.replica_id, controller)
        self.drain = ReplicaDrain(
            self.replica_id,
            self.host,
            self.sessions,
            self.offers,
            controller,
            calls=lambda: self._links.calls,
            clock=clock,
            tokens_per_s=args.rebalancing.tokens_per_s,
            within_s=args.replicas.graceful_shutdown_timeout_s / 2,
        )
        self.heartbeats = Heartbeats(
            self.replica_id,
            self.engine,
            self.sessions,
            controller,
            self.host,
            self.offers,
            self.drain,
            settings_hash=args.settings_hash,
        )
        self.moves = OrderedMoves(self.replica_id, self.host, controller)

    def _run_turns(self, mailbox: Mailbox, spans: Spans | None) -> None:
        args, environment = self._args, self._environment
        commits = TurnCommits(
            environment.controller, self.metrics, patience_s=args.controller.commit_patience_s
        )
        ending = EndingTurns(self.tasks)
        self.empty_turns = EmptyTurns(self.sessions, self.host, commits, ending, self.tasks)
        self.turns = TurnRunner(
            engine=self.engine,
            sessions=self.sessions,
            host=self.host,
            drain=self.drain,
            commits=commits,
            ending=ending,
            unnamed=self.unnamed,
            builder=self.builder,
            event_maker=EventMaker(self._text, self.metrics, environment.clock),
            mailbox=mailbox,
            load=TenantLoad(args.tenants.max_turns_in_flight, args.tenants.max_queued_tokens),
            metrics=self.metrics,
            tasks=self.tasks,
            clock=environment.clock,
            unix_clock=environment.unix_clock,
            traces=replica_traces(spans, self.replica_id),
        )

    def _pinned_calls(self) -> PinnedCalls:
        return PinnedCalls(
            self.replica_id,
            self.engine,
            host=self.host,
            turns=self.turns,
            empty_turns=self.empty_turns,
            moves=self.moves,
            unnamed=self.unnamed,
            drain=self.drain,
            builder=self.builder,
            kv_watch=self.kv_watch,
            metrics=self.metrics,
            describe=self.describe,
            model_info=self.model_info,
            faults=self._faults_to_plant() if self._args.debug.faults else None,
        )

    def _faults_to_plant(self) -> ReplicaFaults:
        from serving.debug.replica_faults import ReplicaFaults  # loaded only where faults are on

        return ReplicaFaults(self.engine, self.host, self.heartbeats, self.tasks)

    def model_info(self) -> ModelInfo:
        args = self._args.model
        return ModelInfo(
            model_id=args.model_id,
            model_path=args.path,
            tokenizer_path=args.path,
            max_context_len=self.engine.max_context_len,
            vocab_size=self.engine.vocab_size,
            created=self._created,
            tool_calls=self._text.tool_format(args.tool_calls),
            reasoning=self._text.reasoning_format(args.reasoning),
            sampling=self._sampling,
            aliases=tuple(args.aliases),
            adapters=args.adapters,
        )

    def describe(self) -> dict[str, Any]:
        """Figures for /get_server_info, JSON ready. `links` counts the connected front ends, `tasks` the event loop's
        tasks. `execution` says what the engine runs on and how."""
        stats = self.engine.stats()
        return {
            "replica_id": self.replica_id,
            "pid": os.getpid(),
            "live_turns": self.turns.num_live,
            "links": len(self._links),
            "tasks": len(asyncio.all_tasks()),
            **asdict(stats),
            "pages": _pages(stats.pages),
            "window_pages": None if stats.window_pages is None else _pages(stats.window_pages),
            "execution": self.engine.describe(),
            "state": "draining" if self.drain.draining else "up",
            "model": asdict(self._model.fingerprint),
        }


def _pages(pages: PageAccounts) -> dict[str, int]:
    return asdict(pages) | {"leaked": pages.leaked}
