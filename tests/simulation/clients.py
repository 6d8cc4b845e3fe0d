"""Clients. Each has a session and does one thing after the other, over connections that may break."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

from ray.exceptions import RayActorError, RayTaskError

from engine.api import SamplingParams
from serving.wire.turns import ErrorInfo, ForkedSession, SessionTurn, TokenPrompt, TurnCall, TurnEvent
from tests.simulation.calls import Call, Stream
from tests.simulation.engine_loop import VOCAB_SIZE
from tests.simulation.logs import Records
from tests.simulation.network import Party
from tests.simulation.parties import Cluster
from tests.simulation.records import Life
from tests.simulation.schedule import Close, Fork, Op, Open, Turn
from tests.simulation.truth import Asked, AskedToRewind, Truth

MOST_TRIES = 8
PAUSE_S = 0.3
RETRIED_STATUSES = frozenset({409, 429, 503})
NEVER_TOLD = frozenset({"idempotency_conflict"})
"""Errors that must not occur, but for turns that a rewind has cut. No client here uses a key for two requests."""
LOG_AWAY = frozenset({"store_unavailable", "controller_unavailable"})
PROBE = Turn(think_s=0.0, new_tokens=1, most=2)
GREEDY = SamplingParams(temperature=0.0)
LONGEST_ANSWER_S = 240.0
"""The longest time that any call of a client may take."""


@dataclass(slots=True)
class Answer:
    """The result of one try: the tokens that were read, and how it ended if the end came."""

    tokens: tuple[int, ...] = ()
    turn_index: int | None = None
    open_key: str | None = None
    finish: str | None = None
    error: ErrorInfo | None = None
    lost: bool = False


class Clients:
    """All client processes, as one party that never fails. `busy` counts the clients at work.

    `undisturbed`: no fault of this run may be noticed by a client.
    """

    def __init__(
        self,
        cluster: Cluster,
        store: Records,
        truth: Truth,
        random: Random,
        limit: int,
        *,
        undisturbed: bool,
    ) -> None:
        self.party = Party("clients", cluster.world)
        self.busy = 0
        self.told_closed: list[Life] = []
        """Sessions that were closed, or will be when their turn in flight ends."""
        self._cluster = cluster
        self._store = store
        self._truth = truth
        self._random = random
        self._limit = limit
        self._undisturbed = undisturbed
        self._names = 0

    def start(self, ops: tuple[Op, ...], session_id: str | None = None) -> None:
        if session_id is None:
            self._names += 1
            session_id = f"s{self._names}"
        self.busy += 1
        self.party.loop.create_task(self._live(session_id, ops))

    async def use_everything(self) -> None:
        """Makes every open session take a turn, after all faults have ended."""
        for session_id in list(self._store.living):
            life = self._store.living.get(session_id)
            if life is None or life in self.told_closed:
                continue
            answer = await self._turn(session_id, PROBE)
            if answer.finish not in ("stop", "length"):
                self._truth.wrong(f"{session_id} takes no turn any more: {answer}")

    async def close_everything(self) -> None:
        """Closes sessions until the log has none."""
        while self._store.living:
            for session_id in list(self._store.living):
                await self._ask_to_close(session_id)

    async def _live(self, session_id: str, ops: tuple[Op, ...]) -> None:
        besides: list[asyncio.Task[None]] = []
        try:
            for op in ops:
                await asyncio.sleep(op.think_s)
                doing = asyncio.create_task(self._do_in_time(session_id, op))
                if isinstance(op, Turn) and op.beside:
                    besides.append(doing)
                else:
                    await doing
            await asyncio.gather(*besides)
        finally:
            self.busy -= 1

    async def _do_in_time(self, session_id: str, op: Op) -> None:
        try:
            async with asyncio.timeout(LONGEST_ANSWER_S * MOST_TRIES):
                await self._do(session_id, op)
        except TimeoutError:
            self._truth.wrong(f"{session_id}: {op} did not end")

    async def _do(self, session_id: str, op: Op) -> None:
        match op:
            case Turn():
                await self._turn(session_id, op)
            case Fork():
                await self._fork(session_id, op)
            case Close():
                await self._close(session_id)
            case Open():
                await self._ask("web.open_session", session_id)

    async def _turn(self, session_id: str, op: Turn) -> Answer:
        if not op.stateless:
            await self._go_back(session_id, op)
        life = None if op.stateless else self._store.living.get(session_id)
        tokens = tuple(self._random.randrange(1, VOCAB_SIZE) for _ in range(op.new_tokens))
        asked = self._truth.ask(None if op.stateless else session_id, tokens, op.most, life, keyed=op.keyed)
        call, answer = self._call(asked, op), Answer()
        for _ in range(MOST_TRIES if op.keyed else 1):
            answer = await self._try(asked, call, op)
            again = answer.lost or (answer.error is not None and answer.error.status in RETRIED_STATUSES)
            if not again:
                break
            await asyncio.sleep(PAUSE_S)
        self._truth.give_up(asked)
        return answer

    async def _go_back(self, session_id: str, op: Turn) -> None:
        """Rewinds the session if the turn is to begin further back, or would have no room."""
        for _ in range(MOST_TRIES):
            life = self._store.living.get(session_id)
            length = 0 if life is None else len(life.history())
            full = length + op.new_tokens + op.most + 2 > self._limit
            if life is None or (op.rewind is None and not full):
                return
            kept_len = length // 8 if full or op.rewind is None else int(op.rewind * length)
            asked = self._truth.ask_to_rewind(session_id, kept_len)
            answer = await self._ask("web.rewind", session_id, kept_len)
            self._check_rewind(asked, answer)
            again = answer is None or (isinstance(answer, ErrorInfo) and answer.status in RETRIED_STATUSES)
            if not again:
                return
            await asyncio.sleep(PAUSE_S)

    def _check_rewind(self, asked: AskedToRewind, answer: object) -> None:
        if answer is True:
            self._truth.rewound(asked)
        failed = answer is None or (isinstance(answer, ErrorInfo) and answer.status >= 500)
        if self._undisturbed and failed and not self._truth.closed_beside(asked):
            self._truth.wrong(f"{asked}: a planned change, and a client sees {answer}")
        if isinstance(answer, ErrorInfo) and answer.code in NEVER_TOLD:
            self._truth.wrong(f"{asked}: {answer}")

    def _call(self, asked: Asked, op: Turn) -> TurnCall:
        session = None
        if asked.session_id is not None:
            key = f"key-{asked.number}" if op.keyed else None
            session = SessionTurn(asked.session_id, idempotency_key=key)
        return TurnCall(
            request_id=f"q{asked.number}",
            prompt=TokenPrompt(asked.tokens),
            sampling=GREEDY,
            max_new_tokens=op.most,
            session=session,
            tells_accepted=asked.number % 2 == 0,  # true for streams over HTTP
        )

    async def _try(self, asked: Asked, call: TurnCall, op: Turn) -> Answer:
        ingress = await self._ingress()
        self._truth.try_now(asked)
        if op.abort_s is not None:
            self.party.loop.call_later(op.abort_s, self._abort, call.request_id)
        before = None if asked.session_id is None else self._store.living.get(asked.session_id)
        stream = Stream(self._cluster.network, self.party, "web.turn", (call,))
        stream.send(ingress)
        answer = Answer()
        try:
            async with asyncio.timeout(LONGEST_ANSWER_S if op.leave_s is None else op.leave_s):
                await self._read(stream, answer)
        except TimeoutError:
            if op.leave_s is None:
                self._truth.wrong(f"number {asked.number}: no end within {LONGEST_ANSWER_S} s")
        except RayTaskError as error:
            self._truth.wrong(f"number {asked.number}: an internal error: {error!r}")
        except RayActorError:
            answer.lost = True
        finally:
            stream.cancel()
        self._check(asked, before, answer)
        return answer

    async def _read(self, stream: Stream, answer: Answer) -> None:
        async for event in stream:
            if isinstance(event, ErrorInfo):
                answer.error = event
                return
            assert isinstance(event, TurnEvent)
            answer.tokens += event.token_ids
            self._read_place(answer, event)
            if event.error is not None:
                answer.error = event.error
            if event.finish is not None:
                answer.finish = event.finish.reason
        if answer.error is None and answer.finish is None:
            self._truth.wrong("an answer ended without an end")

    def _read_place(self, answer: Answer, event: TurnEvent) -> None:
        """Which turn of which session this is. An answer from the log does not name the session."""
        if event.turn_index is None:
            return
        if answer.turn_index not in (None, event.turn_index):
            self._truth.wrong(f"told as turn {answer.turn_index}, and then as turn {event.turn_index}")
        if None not in (answer.open_key, event.open_key) and answer.open_key != event.open_key:
            self._truth.wrong(f"told of session {answer.open_key}, and then of {event.open_key}")
        answer.turn_index, answer.open_key = event.turn_index, event.open_key

    def _check(self, asked: Asked, before: Life | None, answer: Answer) -> None:
        life = None if asked.session_id is None else self._store.living.get(asked.session_id)
        done = answer.finish in ("stop", "length")
        if before is None or before is life:
            self._truth.told(asked, life, answer.turn_index, answer.tokens, done=done)
        if done:
            self._truth.finished(asked, answer.tokens, answer.turn_index, answer.open_key)
        failed = answer.lost or (answer.error is not None and answer.error.status >= 500)
        if self._undisturbed and failed and not self._truth.closed_beside(asked):
            self._truth.wrong(f"number {asked.number}: a planned change, and a client sees {answer}")
        if answer.error is None:
            return
        finished = answer.tokens and answer.tokens == self._truth.right(asked, life, answer.turn_index)
        cut = answer.error.code in NEVER_TOLD and self._truth.was_cut(asked)
        if answer.error.status == 500 or (answer.error.code in NEVER_TOLD and not cut):
            self._truth.wrong(f"number {asked.number}: {answer.error}")
        elif finished and answer.error.code in LOG_AWAY:
            self._truth.wrong(f"number {asked.number}: all of it was told, then {answer.error}")

    async def _fork(self, session_id: str, op: Fork) -> None:
        life = self._store.living.get(session_id)
        length = 0 if life is None else int(op.share * len(life.history()))
        self._names += 1
        child_id = f"s{self._names}"
        answer = await self._ask("web.fork", session_id, child_id, length)
        if isinstance(answer, ForkedSession):
            self.start(op.ops, child_id)

    async def _close(self, session_id: str) -> None:
        life = self._store.living.get(session_id)
        if await self._ask_to_close(session_id) is not True:
            return
        if life is None:  # another turn has opened the session in the meantime
            life = self._store.living.get(session_id)
        if life is not None:
            self.told_closed.append(life)

    async def _ask_to_close(self, session_id: str) -> object:
        close = self._truth.ask_to_close(session_id)
        answer = await self._ask("web.close", session_id)
        if isinstance(answer, bool):
            self._truth.answered(close)
        return answer

    async def _ask(self, method: str, *args: object) -> object:
        """Calls a method of some ingress. Returns the answer, or None if the connection broke."""
        call = Call(self._cluster.network, self.party, method, args)
        call.send(await self._ingress())
        try:
            async with asyncio.timeout(LONGEST_ANSWER_S):
                answer = await call
        except RayTaskError as error:
            self._truth.wrong(f"{method}{args}: an internal error: {error!r}")
        except RayActorError:
            return None
        except TimeoutError:
            self._truth.wrong(f"{method}{args}: no answer")
        else:
            if isinstance(answer, ErrorInfo) and answer.status == 500:
                self._truth.wrong(f"{method}{args}: {answer}")
            return answer
        return None

    def _abort(self, request_id: str) -> None:
        ingresses = self._cluster.serve.ingresses
        if ingresses:
            call = Call(self._cluster.network, self.party, "web.abort", (request_id,))
            call.send(self._random.choice(ingresses))

    async def _ingress(self) -> Party:
        """An ingress that is up. Waits for one."""
        while not self._cluster.serve.ingresses:
            await asyncio.sleep(0.05)
        return self._random.choice(self._cluster.serve.ingresses)
