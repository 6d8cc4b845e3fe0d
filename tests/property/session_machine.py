"""The Hypothesis state machine: any order of events keeps the books and every finished turn exact."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.sequence_kv import pages_for
from tests.property.session_world import World
from tests.property.world_sizes import Sizes
from tests.unit.engine.driver import VOCAB

MAX_SESSIONS = 5
MAX_IN_FLIGHT = 6

PICK = st.integers(0, 59)
TOKENS = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=10)
SHARED = st.sampled_from([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9], [1] * 17])
PROMPTS = st.one_of(TOKENS, SHARED, st.tuples(SHARED, TOKENS).map(lambda pair: pair[0] + pair[1]))
OUTPUT = st.one_of(st.integers(0, 8), st.integers(0, 32))
STEPS = st.sampled_from([0, 0, 0, 1, 3, 20])
SCORED_FROM = st.one_of(st.none(), st.none(), st.integers(0, 40), st.just(10_000))

POOLS = st.sampled_from([(1, 40), (1, 64), (2, 24), (4, 10), (4, 24), (16, 3), (16, 9), (256, 1), (256, 3)])
TIERS = st.sampled_from(
    [(0, 0, False), (48, 0, False), (320, 0, False), (64, 96, False), (64, 640, False), (64, 640, True),
     (320, 96, True), (320, 640, True), (320, 640, True)]
)  # fmt: skip
"""Budgets of host and disk in tokens, and whether everything on the host goes on to disk at once."""
SIZES = st.builds(
    lambda pool, tiers, chains, *limits: Sizes(
        *pool,
        *limits,
        host_pages=pages_for(tiers[0], pool[0]),
        disk_pages=pages_for(tiers[1], pool[0]),
        spare_all=tiers[2],
        chains=chains,
    ),
    POOLS,
    TIERS,
    st.sampled_from([True, True, False]),
    st.sampled_from([1, 3, 8, 64]),
    st.sampled_from([1, 5, 16, 64]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0.0, 0.0, 0.1]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([None, None, 1, 5, 16]),
    st.sampled_from(["off", "ngram", "draft"]),
    st.sampled_from([VOCAB, VOCAB, 3]),
    st.sampled_from([False, True, True]),
    st.sampled_from([1, 1, 2, 8]),
)

rules_run: Counter[str] = Counter()
"""How often each rule was executed in this process."""

events_seen: Counter[str] = Counter()
"""How often each event happened."""

checks_made = [0]
"""How often the whole world was checked."""


def num_steps() -> int:
    """Number of executed rules. A choice within a rule ("disturb: abort") does not count."""
    return sum(count for name, count in rules_run.items() if ":" not in name)


def counted(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def wrapper(self: SessionMachine, **values: Any) -> None:
        rules_run[function.__name__] += 1
        function(self, **values)

    return wrapper


def has_session(machine: SessionMachine) -> bool:
    return bool(machine.world.sessions)


def has_request(machine: SessionMachine) -> bool:
    return bool(machine.world.asks)


def writes_to_disk(machine: SessionMachine) -> bool:
    return machine.world.being_written() is not None


def has_idle_kv(machine: SessionMachine) -> bool:
    return bool(machine.world.with_idle_kv())


def has_room(machine: SessionMachine) -> bool:
    return len(machine.world.asks) < MAX_IN_FLIGHT


class SessionMachine(RuleBasedStateMachine):
    """Rules choose what happens. The world does it and checks the result."""

    world: World

    @initialize(sizes=SIZES)
    def start(self, sizes: Sizes) -> None:
        self.world = World(sizes)
        self.world.open_session()

    @invariant()
    def books_and_contents_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish_everything()
            events_seen.update(self.world.events)
            checks_made[0] += self.world.num_checks
            events_seen["retraction"] += self.world.driver.counters.retractions
            tiers, counters = self.world.driver.cache.tiers, self.world.driver.counters
            events_seen["demotion to the token log"] += tiers.num_to_log
            events_seen["demotion to the host"] += tiers.num_to_host
            events_seen["demotion to the disk"] += tiers.num_to_disk
            events_seen["promotion from the host"] += tiers.num_from_host
            events_seen["promotion from the disk"] += tiers.num_from_disk
            events_seen["page evicted under pressure"] += self.world.driver.cache.evicted.full
            events_seen["draft token"] += counters.draft_tokens
            events_seen["accepted draft token"] += counters.accepted_draft_tokens
            batches = self.world.driver.batches
            events_seen["pending token"] += sum(
                i.pending_from is not None for batch in batches for i in batch.items
            )
            events_seen["several steps in one go"] += sum(batch.num_steps > 1 for batch in batches)
            events_seen[f"speculation: {self.world.sizes.speculation}"] += 1
            events_seen["windowed world"] += self.world.sizes.window_len is not None

    def session(self, pick: int) -> str:
        names = list(self.world.sessions)
        return names[pick % len(names)]

    def asked(self, pick: int) -> str:
        names = list(self.world.asks)
        return names[pick % len(names)]

    # Work in several shapes. Hypothesis picks rules evenly, and most rules should make turns progress.

    @precondition(lambda self: len(self.world.sessions) < MAX_SESSIONS)
    @rule(tokens=PROMPTS, output=OUTPUT, steps=STEPS)
    @counted
    def open_and_talk(self, tokens: list[int], output: int, steps: int) -> None:
        self.world.open_session()
        self._begin(list(self.world.sessions)[-1], tokens, output)
        self._steps(steps)

    @precondition(has_session)
    @precondition(has_room)
    @rule(
        pick=PICK, tokens=PROMPTS, output=OUTPUT, steps=STEPS, scored_from=SCORED_FROM,
        adapter=st.sampled_from([None, None, None, "a", "b", ""]),
    )  # fmt: skip
    @counted
    def begin_turn(
        self, pick: int, tokens: list[int], output: int, steps: int, scored_from: int | None,
        adapter: str | None,
    ) -> None:  # fmt: skip
        self._begin(self.session(pick), tokens, output, scored_from=scored_from, adapter=adapter)
        self._steps(steps)

    @precondition(has_session)
    @precondition(has_room)
    @rule(pick=PICK, tokens=TOKENS, output=OUTPUT, steps=STEPS)
    @counted
    def begin_short_turn(self, pick: int, tokens: list[int], output: int, steps: int) -> None:
        self._begin(self.session(pick), tokens[:3], output % 4)
        self._steps(steps)

    @precondition(has_session)
    @precondition(has_room)
    @rule(pick=PICK, tokens=PROMPTS, output=OUTPUT, steps=STEPS, keep=PICK, rewind_kv=st.booleans())
    @counted
    def begin_rewound_turn(
        self, pick: int, tokens: list[int], output: int, steps: int, keep: int, rewind_kv: bool
    ) -> None:
        session_id = self.session(pick)
        keep %= len(self.world.sessions[session_id].history) + 1
        self._begin(session_id, tokens, output, keep=keep, rewind_kv=rewind_kv)
        self._steps(steps)

    @precondition(has_session)
    @precondition(has_room)
    @rule(pick=PICK, tokens=PROMPTS, output=OUTPUT, steps=STEPS)
    @counted
    def begin_turn_whose_commit_fails(self, pick: int, tokens: list[int], output: int, steps: int) -> None:
        self._begin(self.session(pick), tokens, output, commit_fails=True)
        self._steps(steps)

    @precondition(has_room)
    @rule(
        tokens=PROMPTS, output=OUTPUT, steps=STEPS, priority=st.integers(0, 1),
        logprobs=st.booleans(), large=st.sampled_from([False, False, True]),
        penalty=st.sampled_from([0.0, 0.0, 0.5]),
    )  # fmt: skip
    @counted
    def plain(
        self, tokens: list[int], output: int, steps: int, priority: int, logprobs: bool, large: bool,
        penalty: float,
    ) -> None:  # fmt: skip
        """A request without a session. A large one evicts others. With a penalty each step waits for the step
        before."""
        room = self.world.sizes.room
        tokens = [1 + token % (self.world.sizes.vocab - 1) for token in tokens]
        prompt = (tokens * (64 if large else 1))[: max(room - output, 1)]
        self.world.plain_request(prompt, min(output, room - len(prompt)), priority, logprobs, penalty)
        self._steps(steps)

    @precondition(lambda self: 0 < len(self.world.sessions) < MAX_SESSIONS)
    @rule(pick=PICK, length=st.integers(0, 64), tokens=TOKENS, output=OUTPUT, steps=STEPS)
    @counted
    def fork(self, pick: int, length: int, tokens: list[int], output: int, steps: int) -> None:
        parent, before = self.session(pick), len(self.world.sessions)
        self.world.fork(parent, length)
        if len(self.world.sessions) > before and has_room(self):
            self._begin(list(self.world.sessions)[-1], tokens, output)
            self._steps(steps)

    @precondition(has_request)
    @rule()
    @counted
    def step(self) -> None:
        self.world.step()

    @precondition(has_request)
    @rule(count=st.integers(2, 20))
    @counted
    def several_steps(self, count: int) -> None:
        self._steps(count)

    # Disturbances.

    @precondition(has_request)
    @rule(pick=PICK, how=st.sampled_from(["abort", "retract", "retract", "failed_launch", "failed_step"]))
    @counted
    def disturb_a_request(self, pick: int, how: str) -> None:
        rules_run[f"disturb: {how}"] += 1
        if how in ("failed_launch", "failed_step"):
            getattr(self.world, how)()
        else:
            getattr(self.world, how)(self.asked(pick))

    @precondition(has_session)
    @rule(
        pick=PICK, length=PICK,
        how=st.sampled_from(
            ["demote", "demote_to_host", "demote_to_host", "cut_kv", "move", "retry_last_turn",
             "submit_past_the_controller"]
        ),
    )  # fmt: skip
    @counted
    def disturb_a_session(self, pick: int, length: int, how: str) -> None:
        rules_run[f"disturb: {how}"] += 1
        session_id = self.session(pick)
        if how == "cut_kv":
            self.world.cut_kv(session_id, length)
        else:
            getattr(self.world, how)(session_id)

    @precondition(has_idle_kv)
    @precondition(has_room)
    @rule(
        pick=PICK, keep=PICK, elsewhere=TOKENS, tokens=TOKENS, output=OUTPUT, steps=STEPS,
        what=st.sampled_from(["turn", "turn", "fork", "put away"]),
    )  # fmt: skip
    @counted
    def come_back_with_another_history(
        self,
        pick: int,
        keep: int,
        elsewhere: list[int],
        tokens: list[int],
        output: int,
        steps: int,
        what: str,
    ) -> None:
        """The KV that the session left here belongs to another history. Next the session is used, forked, or put
        away."""
        names = self.world.with_idle_kv()
        session_id = names[pick % len(names)]
        elsewhere = [1 + token % (self.world.sizes.vocab - 1) for token in elsewhere]
        self.world.come_back_with_another_history(session_id, keep, elsewhere)
        self.world.check()
        if what == "put away":
            self.world.put_all_away()
            self.world.end_disk_copies(2)
        if what == "fork" and len(self.world.sessions) < MAX_SESSIONS:
            self.world.fork(session_id, len(self.world.sessions[session_id].history) - 1)
            self.world.check()
        self._begin(session_id, tokens, output)
        self._steps(steps)

    @precondition(has_session)
    @rule(num_writes=st.integers(0, 4), failing=st.sampled_from([False, False, False, True]))
    @counted
    def put_all_away(self, num_writes: int, failing: bool) -> None:
        self.world.put_all_away()
        if failing:
            self.world.fail_disk_copies(1)
        self.world.end_disk_copies(num_writes)

    @precondition(writes_to_disk)
    @precondition(has_room)
    @rule(how=st.sampled_from(["turn", "turn", "move"]), tokens=TOKENS, output=OUTPUT, steps=STEPS)
    @counted
    def disturb_a_write(self, how: str, tokens: list[int], output: int, steps: int) -> None:
        """A turn needs the session before it has reached the disk, or the session moves away and comes back."""
        session_id = self.world.being_written()
        assert session_id is not None
        if how == "move":
            self.world.move(session_id)
        self._begin(session_id, tokens, output)
        self._steps(steps)
        if how == "move":
            self.world.put_all_away()
        self.world.end_disk_copies(1)

    @precondition(has_session)
    @rule(pick=PICK)
    @counted
    def close(self, pick: int) -> None:
        self.world.close(self.session(pick))

    @rule(
        how=st.sampled_from(
            [
                "evict",
                "evict_window",
                "flush",
                "pass_time",
                "end_copies",
                "end_copies",
                "end_disk_copies",
                "end_disk_copies",
                "fail_copies",
                "fail_disk_copies",
            ]
        ),
        num_pages=st.integers(1, 8),
        seconds=st.sampled_from([1.0, 1.0, 1.0, 40.0, 101.0]),
    )
    @counted
    def meanwhile(self, how: str, num_pages: int, seconds: float) -> None:
        rules_run[f"meanwhile: {how}"] += 1
        if how == "flush":
            self.world.flush()
        elif how == "pass_time":
            self.world.pass_time(seconds)
        else:
            getattr(self.world, how)(num_pages)

    def _begin(self, session_id: str, tokens: list[int], output: int, **options: Any) -> None:
        room, vocab = self.world.sizes.room, self.world.sizes.vocab
        tokens = [1 + token % (vocab - 1) for token in tokens]
        self.world.begin_turn(session_id, tokens[: room // 3], min(output, room // 2), **options)

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()
            self.world.check()
