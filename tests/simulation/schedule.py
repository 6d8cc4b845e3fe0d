"""What happens in a run, drawn from its seed: the settings, what each client does, and which faults occur when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

FAULTS = {
    "kill replica": 5,
    "retire replica": 4,
    "kill ingress": 2,
    "kill controller": 4,
    "freeze replica": 3,
    "freeze ingress": 1,
    "freeze controller": 2,
    "cut ingress from replica": 3,
    "cut replica from controller": 3,
    "drain replica": 2,
    "disk fails": 1,
    "cut ingress from controller": 2,
    "break connection": 3,
    "stall engine": 4,
    "log away": 4,
    "clock step": 1,
    "storm": 3,
    "repeats": 2,
}
"""How often each kind of fault is drawn."""

LASTING_S = {
    "freeze replica": 4.0,
    "freeze controller": 4.0,
    "stall engine": 6.0,
    "log away": 3.0,
    "log frozen": 3.0,
    "cut controller from log": 2.0,
    "disk fails": 3.0,
}
MOVES = {
    "kill replica": 2,
    "retire replica": 2,
    "freeze replica": 3,
    "cut ingress from replica": 6,
    "cut replica from controller": 2,
    "break connection": 2,
    "log away": 2,
    "kill controller": 1,
    "repeats": 1,
    "drain replica": 1,
}
"""The same for runs in which sessions move. Most of these faults leave the former owner alive."""

REDIS_SHARE = 0.3
"""Share of the schedules that have the session log in Redis."""

REDIS_FAULTS = {
    "log away": 3,
    "log frozen": 3,
    "cut controller from log": 3,
    "kill controller": 3,
    "storm": 1,
}
"""The same for the additional faults in runs with the log in Redis."""
PLANNED = {
    "retire replica": 4,
    "drain replica": 3,
    "freeze controller": 2,
    "stall engine": 2,
    "clock step": 3,
    "repeats": 1,
    "disk fails": 1,
}
"""The same for runs in which processes end only as planned. Clients notice nothing of these faults."""
MOVE = "move session"
MOVE_SHARE = 0.3
"""Share of the schedules in which an operator moves sessions by hand. Clients notice nothing of it."""
MAY_CUT_STREAMS = frozenset({"freeze controller", "stall engine", "repeats"})
"""Kinds of PLANNED after which a turn may outlast the time that its replica has to end it, or may be told to go on
elsewhere."""

OVERTAKEN_SHARE = 0.06
"""Share of the schedules in which sessions go on without a turn whose client still waits: with its next turn, or under
another session of the same name. Its front end stands still while its replica dies, and asks for it again too late."""
LONG_SHARE = 0.4
"""Share of the schedules with planned changes in which answers last. A change costs nothing where no turn is under
way."""
LASTING = {"slowness": 30}
"""The settings of both. An answer takes about a second."""
OVERTAKEN_S = 4.0

UNDISTURBED = (
    ("replicas", 2),
    ("ingresses", 2),
    ("num_pages", 256),
    ("host_pages", 0),
    ("disk_pages", 0),
    ("prefix_cache", False),
    ("slowness", 8),
    ("ngram", False),
    ("rebalancing", False),
    ("strict", False),
    ("log", "sqlite"),
)
"""Settings of runs with room for all KV, in which no session has a reason to move."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. `rewind`: the share of the history that is kept (None: all). After `leave_s` the client leaves; after
    `abort_s` it aborts the turn. `beside`: the client goes on meanwhile, perhaps with the session's next turn."""

    think_s: float
    new_tokens: int
    most: int
    rewind: float | None = None
    leave_s: float | None = None
    abort_s: float | None = None
    keyed: bool = True
    stateless: bool = False
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Fork:
    """A fork at a share of the history. The child's client runs beside this one."""

    think_s: float
    share: float
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Close:
    think_s: float


@dataclass(frozen=True, slots=True)
class Open:
    """Opens the session before its first turn."""

    think_s: float


Op = Turn | Fork | Close | Open


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. `steps`: a death comes that many callbacks later, so that it interrupts something."""

    at_s: float
    kind: str
    who: int
    lasts_s: float
    steps: int
    amount: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything in a run except the random choices of network and scheduler. Those are drawn from `seed` during the
    run."""

    seed: int
    settings: tuple[tuple[str, Any], ...]
    clients: tuple[tuple[Op, ...], ...]
    faults: tuple[Fault, ...]

    def without(self, **changes: Any) -> Schedule:
        return replace(self, **changes)

    def lines(self) -> list[str]:
        """The schedule as text for people."""
        lines = [f"seed {self.seed}", "settings " + ", ".join(f"{k}={v}" for k, v in self.settings)]
        for number, ops in enumerate(self.clients):
            lines += [f"client {number}: {op}" for op in ops]
        return lines + [str(fault) for fault in self.faults]


def make_schedule(seed: int, turns: int = 20) -> Schedule:
    """A schedule of about `turns` turns. In part of the schedules sessions move often and are often rewound."""
    random = Random(f"late {seed}")
    if random.random() < OVERTAKEN_SHARE:
        return _overtaken(random, seed, turns)
    long = random.random() < LONG_SHARE
    random = Random(f"schedule {seed}")
    share = random.random()
    moving, planned = share < 0.4, share >= 0.85
    clients = random.randint(2, 6)
    each = max(1, turns // clients)
    ops = tuple(_client(random, each, 0.4 if moving else 0.15) for _ in range(clients))
    end_s = max(sum(op.think_s for op in some) for some in ops) + 0.2 * each
    faults = (random.randint(3, 8) if moving else random.choice((0, 1, 2, 3, 4, 6))) + turns // 50
    kinds = MOVES if moving else PLANNED if planned else FAULTS
    settings = _settings(random)
    if planned and long:
        settings, ops = _with(settings, LASTING), tuple(map(_long, ops))
    wrong = [_fault(random, kinds, end_s) for _ in range(faults)]
    random = Random(f"log {seed}")
    redis = random.random() < REDIS_SHARE
    if redis:
        wrong += [_fault(random, REDIS_FAULTS, end_s) for _ in range(random.choice((0, 1, 2, 3)))]
    random = Random(f"moves {seed}")
    if random.random() < MOVE_SHARE:
        wrong += [_fault(random, {MOVE: 1}, end_s) for _ in range(random.choice((2, 5, 10)))]
    return Schedule(
        seed,
        (*settings, ("log", "redis" if redis else "sqlite")),
        ops,
        tuple(sorted(wrong, key=lambda fault: fault.at_s)),
    )


def _overtaken(random: Random, seed: int, turns: int) -> Schedule:
    """Clients do not wait for their long answers. Several times a front end stands still while a replica dies."""
    clients = tuple(_impatient(random, max(1, turns // 4)) for _ in range(4))
    end_s = max(sum(op.think_s for op in some) for some in clients)
    wrong: list[Fault] = []
    for begin_s in range(1, max(2, int(end_s)), int(2 * OVERTAKEN_S)):
        at_s = begin_s + random.uniform(0.0, 2.0)
        wrong.append(Fault(at_s, "freeze ingress", random.randrange(2), OVERTAKEN_S, 0, 0.0))
        wrong.append(Fault(at_s + random.uniform(0.0, 0.5), "kill replica", random.randrange(2), 0.0, 0, 0.0))
    return Schedule(seed, _with(UNDISTURBED, LASTING), clients, tuple(wrong))


def _impatient(random: Random, turns: int) -> tuple[Op, ...]:
    ops: list[Op] = []
    while sum(isinstance(op, Turn) for op in ops) < turns:
        ops.append(Turn(random.expovariate(1.0), random.randint(1, 6), 8, beside=True))
        if random.random() < 0.5:
            ops.append(Turn(random.expovariate(2.0), random.randint(1, 6), 2))
        else:
            ops += [Close(random.expovariate(2.0)), Open(random.expovariate(5.0))]
    return tuple(ops)


def _long(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    return tuple(replace(op, most=8) if isinstance(op, Turn) else op for op in ops)


def _with(settings: tuple[tuple[str, Any], ...], changes: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, changes.get(name, value)) for name, value in settings)


def _settings(random: Random) -> tuple[tuple[str, Any], ...]:
    host_pages = random.choice((0, 20, 200))
    return (
        ("replicas", random.choice((1, 2, 2, 2, 2, 3))),
        ("ingresses", random.choice((1, 1, 2))),
        ("num_pages", random.choice((96, 128, 256))),
        ("host_pages", host_pages),
        ("disk_pages", random.choice((0, 100)) if host_pages else 0),
        ("prefix_cache", random.random() < 0.8),
        ("slowness", random.choice((1, 1, 8, 30))),
        ("ngram", random.random() < 0.2),
        ("rebalancing", random.random() < 0.5),
        ("strict", random.random() < 0.1),
    )


def _client(random: Random, turns: int, rewinds: float, depth: int = 0) -> tuple[Op, ...]:
    ops: list[Op] = []
    pace_s = random.choice((0.02, 0.1, 0.5))
    for _ in range(turns):
        think_s = random.expovariate(1 / pace_s)
        draw = random.random()
        if draw < 0.06 and depth == 0:
            ops.append(Fork(think_s, random.random(), _client(random, random.randint(1, 3), rewinds, 1)))
        elif draw < 0.10:
            ops.append(Close(think_s))
            if random.random() < 0.5:
                ops.append(Open(random.expovariate(1 / pace_s)))
        else:
            ops.append(_turn(random, think_s, rewinds))
    return tuple(ops)


def _turn(random: Random, think_s: float, rewinds: float) -> Turn:
    most = random.choice((1, 1, 2, 2, 3, 4, 8))
    return Turn(
        think_s=think_s,
        new_tokens=random.randint(1, 6),
        most=most,
        rewind=random.random() if random.random() < rewinds else None,
        leave_s=random.expovariate(1 / random.choice((0.03, 0.4))) if random.random() < 0.12 else None,
        abort_s=random.expovariate(1 / random.choice((0.02, 0.3))) if random.random() < 0.06 else None,
        keyed=random.random() < 0.85,
        stateless=random.random() < 0.05,
        beside=random.random() < 0.04,
    )


def _fault(random: Random, kinds: dict[str, int], end_s: float) -> Fault:
    kind = random.choices(tuple(kinds), tuple(kinds.values()))[0]
    return Fault(
        at_s=random.uniform(0.0, end_s),
        kind=kind,
        who=random.randrange(6),
        lasts_s=min(25.0, random.expovariate(1 / LASTING_S.get(kind, 1.5))),
        steps=random.choice((0, 0, 1, 2, 5, 10, 40)),
        amount=random.uniform(-1.0, 1.0),
    )
