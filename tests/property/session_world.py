"""One replica's books, scheduler and session controller, and everything that may happen to them.

The world keeps its own copy of every committed history. After each event tests/property/world_checks.py compares the
two.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cache.slots import SlotState
from controllers.errors import SessionClosing, TurnInFlight
from controllers.records import SessionRecord
from controllers.session import SessionController
from controllers.tokens import encode_tokens
from controllers.turns import Replay, Turn
from engine.api import FinishReason, LogprobParams, SessionBusy, StepFailed
from engine.batch import ScheduledBatch
from tests.property.world_checks import check_world
from tests.property.world_sizes import Sizes
from tests.unit.engine.driver import Driver, Outcome, greedy, namespace_of, request

TIMEOUT_S = 100.0


@dataclass
class Ask:
    """A request in flight. `turn` is None if it has no session."""

    prompt: list[int]
    max_new_tokens: int
    input_start: int | None = None
    turn: Turn | None = None
    commit_fails: bool = False


@dataclass
class Session:
    """What the world knows about a session. `finished` is the last sequence that the engine completed for it, `adapter`
    that of its last turn."""

    epoch: int = 1
    history: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    turns: int = 0
    key: str | None = None
    adapter: str = ""


class World:
    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.driver = Driver(
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            context_len=sizes.room + 1,
            chunk_size=sizes.chunk_size,
            max_batch_tokens=sizes.max_batch_tokens,
            max_running=sizes.max_running,
            eos_probability=sizes.eos_probability,
            prefix_cache=sizes.prefix_cache,
            window_len=sizes.window_len,
            num_window_pages=sizes.num_window_pages,
            host_pages=sizes.host_pages,
            disk_pages=sizes.disk_pages,
            speculation=sizes.speculation,
            ahead=sizes.ahead,
            decode_steps=sizes.decode_steps,
            copies_wait=True,
            vocab=sizes.vocab,
        )
        if sizes.spare_all:
            tiers = self.driver.cache.tiers
            tiers._spare_bytes = tiers.accounts()[0].budget_bytes
        self.now_s = 0.0
        cache = self.driver.cache
        self.controller = SessionController(
            lambda: self.now_s,
            TIMEOUT_S,
            make_chain=lambda _, adapter: cache.empty_chain(namespace_of(adapter)),
        )
        self.sessions: dict[str, Session] = {}
        self.asks: dict[str, Ask] = {}
        self.events: Counter[str] = Counter()
        self.num_checks = 0
        self._names = 0

    # What clients do.

    def open_session(self) -> None:
        name = self._name("s")
        self.sessions[name] = Session()
        self._adopt(name)

    def begin_turn(
        self,
        session_id: str,
        new_tokens: list[int],
        max_new_tokens: int,
        *,
        keep: int | None = None,
        rewind_kv: bool = False,
        commit_fails: bool = False,
        scored_from: int | None = None,
        adapter: str | None = None,
    ) -> None:
        """Begins a turn as the replica does. It must be refused if the session has a turn already or is closing.

        `scored_from` asks for the input's log-probabilities from that position on, or from the new input if that is
        earlier. A history that leaves no room is cut to half or less. The replica cuts the KV of a rewound turn at once
        (`rewind_kv`). If it does not, admission must. Without an `adapter` the turn has that of the turn before.
        """
        session = self.sessions[session_id]
        adapter = session.adapter if adapter is None else adapter
        limit = self.sizes.room - len(new_tokens) - max_new_tokens
        if keep is None and len(session.history) > limit:
            keep = len(session.history) // 2
        keep = None if keep is None else min(keep, limit)
        name = self._name("t")
        try:
            turn = self.controller.begin_turn(
                session_id, session.epoch, rewind_to=keep, idempotency_key=name, adapter=adapter
            )
        except (TurnInFlight, SessionClosing) as refusal:
            self.events[type(refusal).__name__] += 1
            assert any(a.turn is not None and a.turn.session_id == session_id for a in self.asks.values())
            return
        assert isinstance(turn, Turn)
        assert list(turn.history) == session.history
        self.events["turn with another adapter"] += bool(session.history) and adapter != session.adapter
        session.adapter = adapter
        if turn.history_len < len(session.history):
            self.events["rewound turn"] += 1
            if rewind_kv:
                self.driver.cache.rewind_session(session_id, turn.history_len)
        prompt = [*turn.history[: turn.history_len], *new_tokens]
        input_start = None if scored_from is None else min(scored_from, turn.history_len)
        if input_start is not None:
            self.events["scored history"] += input_start < turn.history_len
        self.asks[name] = Ask(prompt, max_new_tokens, input_start, turn, commit_fails)
        self.driver.add(
            request(
                name, new_tokens, max_new_tokens, history=turn.history, history_len=turn.history_len,
                history_chain=turn.chain if self.sizes.chains else None, session_id=session_id,
                namespace=namespace_of(adapter), adapter=adapter,
                logprobs=None if input_start is None else LogprobParams(input_start=input_start),
            )
        )  # fmt: skip

    def fork(self, parent_id: str, length: int) -> None:
        """Forks a session between turns at any length. The fork's epoch is its own."""
        parent = self.sessions[parent_id]
        length = min(length, len(parent.history))
        try:
            fork = self.controller.begin_fork(parent_id, parent.epoch, length)
        except (TurnInFlight, SessionClosing):
            self.events["fork refused"] += 1
            return
        name = self._name("s")
        child = Session(history=parent.history[:length], adapter=parent.adapter)
        self.controller.finish_fork(fork, SessionRecord(name, "", child.epoch, "replica", b"", 0))
        self.sessions[name] = child
        covered = self.driver.fork(
            parent_id, name, fork.history, length, fork.chain if self.sizes.chains else None
        )
        assert covered <= length
        self.events["fork with KV" if covered else "fork without KV"] += 1
        self.events["fork in the middle of a page"] += covered % self.sizes.page_size > 0

    def retry_last_turn(self, session_id: str) -> None:
        """Retries the key of a committed turn. The controller replays the result and runs nothing."""
        session = self.sessions[session_id]
        if session.key is not None:
            replay = self.controller.begin_turn(session_id, session.epoch, idempotency_key=session.key)
            assert isinstance(replay, Replay)
            assert replay.result == session.key.encode()
            self.events["replay"] += 1

    def submit_past_the_controller(self, session_id: str) -> None:
        """A second turn that reaches the scheduler is refused there too."""
        if self.driver.scheduler.in_turn(session_id):
            name = self._name("x")
            self.driver.add(request(name, [1], session_id=session_id))
            finish = self.driver.outcomes.pop(name).finish
            assert finish is not None
            assert isinstance(finish.error, SessionBusy)
            self.events["SessionBusy"] += 1

    def plain_request(
        self, prompt: list[int], max_new_tokens: int, priority: int, logprobs: bool, penalty: float
    ) -> None:
        name = self._name("p")
        start = len(prompt) // 2 if logprobs else None
        self.asks[name] = Ask(prompt, max_new_tokens, start)
        params = LogprobParams(input_start=start) if logprobs else None
        sampling = greedy(max_new_tokens, presence_penalty=penalty)
        self.driver.add(request(name, prompt, priority=priority, logprobs=params, sampling=sampling))

    def abort(self, name: str) -> None:
        self.driver.abort(name)
        self._settle()

    def close(self, session_id: str) -> None:
        if self.controller.close(session_id) is None:
            self._end_session(session_id)
        else:
            self.events["close deferred"] += 1

    # What the replica does by itself.

    def step(self) -> ScheduledBatch | None:
        batch = self.driver.step()
        self._settle()
        return batch

    def failed_launch(self) -> None:
        """The device writes the step's KV, then raises. The step's requests end with an error."""
        self.driver.fail_launch(StepFailed("device lost"))
        self._settle()

    def failed_step(self) -> None:
        """The step in flight fails after the next step was launched."""
        self.events["step failed under another"] += self.driver.in_flight is not None
        self.driver.step(StepFailed("device lost"))
        self._settle()

    def retract(self, name: str) -> None:
        self.events["forced retraction"] += self.driver.scheduler.retract(name)

    def evict(self, num_pages: int) -> None:
        self.driver.prefixes.evict(num_pages)

    def evict_window(self, num_pages: int) -> None:
        self.driver.prefixes.evict_window(num_pages)

    def flush(self) -> None:
        self.driver.cache.flush()

    def demote(self, session_id: str) -> None:
        """Retention drops an idle session's KV. Its history stays."""
        if not self.driver.scheduler.in_turn(session_id):
            self.driver.scheduler.release_session(session_id)

    def demote_to_host(self, session_id: str) -> None:
        """Moves an idle session to the host, as if it were the next to give way."""
        slot = self.driver.cache._slots.get(session_id)
        if slot is not None and slot.state is SlotState.IDLE:
            self.driver.cache.tiers.demote(slot)

    def put_all_away(self) -> None:
        """Moves all idle sessions to the host and ends their copies. Those longest on the host go on to disk."""
        for session_id in self.sessions:
            self.demote_to_host(session_id)
            self.check()
            self.end_copies(len(self.driver.runner._copies))
            self.check()

    def being_written(self) -> str | None:
        """The open session that is being written to disk, or None."""
        write = self.driver.cache.tiers._write
        return write[0].session_id if write is not None and write[0].session_id in self.sessions else None

    def end_copies(self, count: int) -> None:
        self.events["copy ended"] += min(count, len(self.driver.runner._copies))
        self.driver.runner.end_copies(count)

    def end_disk_copies(self, count: int) -> None:
        """Ends `count` disk copies. The end of one copy may begin the next."""
        for _ in range(count):
            self.check()
            self.events["disk copy ended"] += bool(self.driver.runner._disk_copies)
            self.driver.runner.end_disk_copies()

    def fail_copies(self, count: int) -> None:
        self.events["copy failed"] += min(count, len(self.driver.runner._copies))
        self.driver.runner.end_copies(count, MemoryError())

    def fail_disk_copies(self, count: int) -> None:
        """Fails disk copies: the disk is full, or a read does not return what was written."""
        self.events["disk copy failed"] += min(count, len(self.driver.runner._disk_copies))
        self.driver.runner.end_disk_copies(count, OSError())

    def cut_kv(self, session_id: str, length: int) -> None:
        """Cuts KV anywhere between turns. The missing part is computed again."""
        if not self.driver.scheduler.in_turn(session_id):
            self.driver.cache.rewind_session(session_id, length)

    def move(self, session_id: str) -> None:
        """The session was owned elsewhere for a while. It comes back with its log at a newer epoch."""
        if not self.driver.scheduler.in_turn(session_id):
            self.controller.drop(session_id)
            self.driver.scheduler.release_session(session_id)
            self.sessions[session_id].epoch += 1
            self._adopt(session_id)

    def come_back_with_another_history(self, session_id: str, keep: int, tokens: list[int]) -> None:
        """The session (one of `with_idle_kv`) was owned elsewhere, was rewound there to `keep` tokens, and continued
        with `tokens`. Nothing has freed the KV that it left here. That KV is longer than `keep` tokens, and its next
        token differs from the new history's."""
        session, slot = self.sessions[session_id], self.driver.cache._slots.get(session_id)
        assert slot is not None
        keep %= min(slot.usable_len, len(session.history))
        if tokens[0] == session.history[keep]:
            tokens = [1 + tokens[0] % (self.sizes.vocab - 1), *tokens[1:]]
        session.history = [*session.history[:keep], *tokens]
        session.epoch += 1
        session.turns += 1
        self.controller.drop(session_id)
        self._adopt(session_id)
        on_disk = slot.entry is not None and slot.entry.on_disk
        self.events[f"KV of another history: {'on disk' if on_disk else slot.state.name}"] += 1

    def with_idle_kv(self) -> list[str]:
        """Open sessions between turns with KV on the device, the host or the disk."""
        return [
            slot.session_id
            for slot in self.driver.cache._slots
            if slot.usable_len
            and self.sessions[slot.session_id].history
            and not self.driver.scheduler.in_turn(slot.session_id)
        ]

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for session_id in self.controller.expired():
            assert not self.driver.scheduler.in_turn(session_id)
            self.events["expired"] += 1
            self.close(session_id)

    def finish_everything(self) -> None:
        """Ends every request. Then, after all sessions are closed and the cache is flushed, every page is free."""
        for _ in range(3000):
            if not self.driver.scheduler.has_work:
                break
            if self.step() is None:
                self.end_copies(1)
                self.end_disk_copies(1)
            self.check()
        self.driver.settle()
        assert not self.asks, f"never answered: {list(self.asks)}"
        for session_id in list(self.sessions):
            self.close(session_id)
            self.check()
        while self.driver.runner._copies or self.driver.runner._disk_copies:
            self.end_copies(1)
            self.end_disk_copies(1)
            self.check()
        self.driver.assert_empty()
        assert not self.driver.runner._saved, "host memory of nobody"
        assert not self.driver.runner._spilled, "files of nobody"
        tiers = self.driver.cache.tiers
        assert (tiers._copies, tiers._write) == ({}, None)
        assert self.driver.cache.num_sessions == 0

    def check(self) -> None:
        """Checks what must hold after each event."""
        self.num_checks += 1
        check_world(self)

    # Turning the engine's answers into commits.

    def _settle(self) -> None:
        for name in [name for name in self.asks if self.driver.outcomes[name].finish is not None]:
            ask, outcome = self.asks.pop(name), self.driver.outcomes.pop(name)
            self._check_answer(ask, outcome)
            self.events[str(outcome.reason)] += 1
            if ask.turn is not None:
                self._end_turn(name, ask, ask.turn, outcome)

    def _check_answer(self, ask: Ask, outcome: Outcome) -> None:
        expected = self.driver.oracle(ask.prompt, ask.max_new_tokens)
        assert outcome.token_ids == expected[: len(outcome.token_ids)]
        done = outcome.reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert outcome.last is not None
        assert outcome.last.prompt_tokens == len(ask.prompt)
        assert outcome.cached < len(ask.prompt) or ask.max_new_tokens == 0
        if done:
            assert len(outcome.token_ids) == len(expected)
        if ask.input_start is not None:
            scored = [entry.token_id for entry in outcome.input_logprobs]
            wanted = ask.prompt[ask.input_start :]
            assert scored == (wanted if done else wanted[: len(scored)])

    def _end_turn(self, name: str, ask: Ask, turn: Turn, outcome: Outcome) -> None:
        session = self.sessions[turn.session_id]
        done = outcome.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if done:
            session.finished = ask.prompt + outcome.token_ids
        if done and not ask.commit_fails:
            new_tokens = ask.prompt[turn.history_len :]
            record = self.controller.prepare_commit(turn, new_tokens, outcome.token_ids, name.encode())
            self.controller.commit_turn(turn, record)
            session.history = list(session.finished)
            session.turns += 1
            session.key = name
            self.events["committed"] += 1
        else:
            if done and len(outcome.token_ids) % 2:
                # The replica frees the turn's KV at once, or else leaves it and the next turn does not use it.
                self.driver.cache.rewind_session(turn.session_id, turn.history_len)
            self.controller.abort_turn(turn)
            self.events["commit failed"] += done
        if self.controller.is_closed(turn.session_id):
            self._end_session(turn.session_id)

    def _end_session(self, session_id: str) -> None:
        self.driver.scheduler.release_session(session_id)
        self.controller.drop(session_id)
        del self.sessions[session_id]
        self.events["closed"] += 1

    def _adopt(self, session_id: str) -> None:
        session = self.sessions[session_id]
        history = encode_tokens(session.history)
        record = SessionRecord(session_id, "", session.epoch, "replica", history, session.turns)
        self.controller.adopt(record)
        session.key = None

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"
