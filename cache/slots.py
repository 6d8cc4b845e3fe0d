"""SlotTable: every session's KV between turns, and the order in which idle sessions give way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from cache.sequence_kv import SequenceKV
from cache.tiers import StoredKV


class SlotState(Enum):
    LENT = auto()  # a turn has the KV
    IDLE = auto()  # KV on the device
    SAVING = auto()  # KV on the device, being copied to the host; a turn may take it back at any time
    STORED = auto()  # KV in host memory or on disk only
    LOADING = auto()  # device pages are being filled from host or disk


@dataclass(frozen=True, slots=True)
class KVPlace:
    """Where a session's KV is ("device", "host" or "disk"), and how many tokens it covers (None: a turn has it)."""

    tier: str
    tokens: int | None


@dataclass(slots=True)
class SessionSlot:
    """A session's KV between turns.

    `kv` is there in states IDLE, SAVING and LOADING, `entry` in SAVING, STORED and LOADING, `borrower` (a request id)
    in LENT. The session id is only a way to find the KV; its tokens decide what a turn may use of it.
    """

    session_id: str
    state: SlotState
    kv: SequenceKV | None = None
    borrower: str | None = None
    entry: StoredKV | None = None

    @property
    def contents(self) -> SequenceKV | StoredKV | None:
        """The object that knows the KV's tokens; None while a turn has it."""
        return self.entry if self.entry is not None else self.kv

    @property
    def usable_len(self) -> int:
        """Tokens of KV, in whatever tier, that a turn may continue from if its history begins with them."""
        contents = self.contents
        return 0 if contents is None else len(contents.chain)

    @property
    def place(self) -> KVPlace:
        if self.state is SlotState.STORED:
            assert self.entry is not None
            return KVPlace(self.entry.tier, self.usable_len)
        return KVPlace("device", None if self.state is SlotState.LENT else self.usable_len)


class SlotTable:
    """Slots by session id, those that could be demoted (least recently used first), and the sessions whose next turns
    wait.

    A slot's state changes only through `put` and `move`.
    """

    def __init__(self) -> None:
        self._slots: dict[str, SessionSlot] = {}
        self._idle: OrderedDict[str, SessionSlot] = OrderedDict()
        self._expected: dict[str, tuple[int, int]] = {}  # places of their turns in the queue, smaller first

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[SessionSlot]:
        return iter(self._slots.values())

    def get(self, session_id: str) -> SessionSlot | None:
        return self._slots.get(session_id)

    def put(self, slot: SessionSlot) -> None:
        """Adds or replaces a slot, as the most recently used."""
        self._slots[slot.session_id] = slot
        self.move(slot, slot.state)

    def move(self, slot: SessionSlot, state: SlotState) -> None:
        slot.state = state
        self._idle.pop(slot.session_id, None)
        if state is SlotState.IDLE:
            self._idle[slot.session_id] = slot

    def remove(self, session_id: str) -> None:
        del self._slots[session_id]
        self._idle.pop(session_id, None)

    def expect(self, session_id: str, place: tuple[int, int]) -> None:
        """The session's next turn waits at this place in the queue: the sooner it runs, the later its KV should be
        demoted."""
        self._expected[session_id] = place

    def unexpect(self, session_id: str) -> None:
        self._expected.pop(session_id, None)

    def is_expected(self, session_id: str) -> bool:
        return session_id in self._expected

    def next_victim(self, before: str | None = None) -> SessionSlot | None:
        """The idle session to demote next: the longest idle without a waiting turn. If turns wait for all of them, it
        is the one whose turn is last in the queue. `before` and the sessions ahead of it in the queue are spared."""
        for session_id, slot in self._idle.items():
            if session_id not in self._expected:
                return slot
        last = max(self._idle, key=self._expected.__getitem__, default=None)
        own_place = self._expected.get(before) if before is not None else None
        if last is None or (own_place is not None and self._expected[last] <= own_place):
            return None
        return self._idle[last]
