"""What must hold for every answer. The reference is the null runner's own rule, applied to the history in the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from controllers.session_log.kept_answers import KEPT_ANSWERS
from tests.simulation.engine_loop import EOS_PROBABILITY, VOCAB_SIZE
from tests.simulation.records import Committed, Life, LogListener
from tests.unit.engine.null_runner import null_generate

LEAVING_HEARD_S = 0.05
"""Within this time the ingress knows that a client has left. Until then a turn may open its closed session anew."""


@dataclass(slots=True)
class Asked:
    """A turn that a client wants. The client may ask for it several times, last at `tried_s`. Its first token is in no
    other turn. `lives` are those of its session in which it was committed, at `committed_s`. `keyed`: its client names
    a key."""

    number: int
    session_id: str | None
    tokens: tuple[int, ...]
    most: int
    life: Life | None
    keyed: bool
    asked_s: float
    given_up_s: float | None = None
    tried_s: float = 0.0
    committed: list[Committed] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    committed_s: list[float] = field(default_factory=list)
    done: bool = False


@dataclass(slots=True)
class AskedToRewind:
    """A rewind that a client has asked for once. It may happen at any time after that, once in each session of the
    name. `lives` are those in which it was committed."""

    session_id: str
    length: int
    asked_s: float
    lives: list[Life] = field(default_factory=list)


@dataclass(slots=True)
class CommittedRewind:
    """A rewind that the log has taken. `told`: a client heard of it."""

    session_id: str
    length: int
    committed_s: float
    told: bool = False


@dataclass(slots=True)
class AskedToClose:
    """A close that was asked for. `answered_s` is None while there is no answer; the close may then happen at any
    time."""

    session_id: str
    answered_s: float | None = None


class Truth(LogListener):
    """Keeps every turn and close that was asked for, and every violation. `clock` returns virtual seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.violations: list[str] = []
        self._clock = clock
        self._closes: list[AskedToClose] = []
        self._rewinds: list[AskedToRewind] = []
        self._committed_rewinds: list[CommittedRewind] = []
        self._closed: dict[str | None, list[Life]] = {}
        self._asked: dict[int, Asked] = {}
        self.turns = 0

    def wrong(self, what: str) -> None:
        self.violations.append(what)

    def ask(
        self,
        session_id: str | None,
        tokens: tuple[int, ...],
        most: int,
        life: Life | None,
        *,
        keyed: bool = False,
    ) -> Asked:
        number = len(self._asked) + 1
        asked = Asked(number, session_id, (number, *tokens), most, life, keyed, self._clock())
        self._asked[number] = asked
        return asked

    def ask_to_close(self, session_id: str) -> AskedToClose:
        self._closes.append(AskedToClose(session_id))
        return self._closes[-1]

    def ask_to_rewind(self, session_id: str, length: int) -> AskedToRewind:
        self._rewinds.append(AskedToRewind(session_id, length, self._clock()))
        return self._rewinds[-1]

    def rewound(self, asked: AskedToRewind) -> None:
        """A client was told that the session is rewound. Requests side by side may ask for the same; each that is told
        as done has a commit of its own."""
        for each in self._committed_rewinds:
            alike = (each.session_id, each.length) == (asked.session_id, asked.length)
            if alike and not each.told and each.committed_s >= asked.asked_s:
                each.told = True
                return
        self.wrong(f"{asked}: told as done, and not in the log")

    def answered(self, close: AskedToClose) -> None:
        close.answered_s = self._clock()

    def closed_beside(self, asked: Asked | AskedToRewind) -> bool:
        """Whether the session was asked to close while the client asked for the turn or the rewind. Then it may be lost
        with it."""
        return any(
            each.session_id == asked.session_id
            and (each.answered_s is None or each.answered_s >= asked.asked_s)
            for each in self._closes
        )

    def try_now(self, asked: Asked) -> None:
        """The client asks for the turn, for the first time or again."""
        asked.tried_s = self._clock()

    def give_up(self, asked: Asked) -> None:
        """The client stops asking for the turn."""
        asked.given_up_s = self._clock()

    def closed(self, life: Life) -> None:
        """Somebody must have asked for the close. No session here is idle long enough to expire."""
        self._closed.setdefault(life.session_id, []).append(life)
        asked = (
            each.session_id == life.session_id
            and (each.answered_s is None or each.answered_s >= life.opened_s)
            for each in self._closes
        )
        if not any(asked):
            self.wrong(f"{life.session_id} was closed, and nobody asked for it")

    def committed(self, life: Life, turn: Committed) -> None:
        """The log has taken a turn. Checks it."""
        if not turn.input and not turn.output:
            self._committed_rewind(life, turn)
            return
        asked = self._asked.get(turn.input[0]) if turn.input else None
        name = f"turn {turn.turn_index} of {life.session_id}"
        if asked is None or asked.session_id != life.session_id or asked.tokens != turn.input:
            self.wrong(f"{name}: nobody asked for it")
            return
        if not all(map(partial(self._asks_anew, asked), asked.lives, asked.committed, asked.committed_s)):
            self.wrong(f"{name}: asked for once (number {asked.number}), committed twice")
        of_another = asked.life is not None and asked.life is not life
        if of_another and asked.given_up_s is not None and asked.given_up_s + LEAVING_HEARD_S < life.opened_s:
            self.wrong(f"{name}: asked for in an earlier session of that name (number {asked.number})")
        asked.committed.append(turn)
        asked.lives.append(life)
        asked.committed_s.append(self._clock())
        if turn.rewound:
            self.wrong(f"{name}: rewound, and nobody asked for it")
        if turn.output != expected((*turn.before, *turn.input), asked.most):
            self.wrong(f"{name}: committed {turn.output}, which does not follow from its history")

    def _committed_rewind(self, life: Life, turn: Committed) -> None:
        length = len(turn.before)
        self._committed_rewinds.append(CommittedRewind(life.session_id, length, self._clock()))
        for asked in reversed(self._rewinds):  # of tries alike, an earlier one may have been refused
            alike = (asked.session_id, asked.length) == (life.session_id, length)
            if alike and all(each is not life for each in asked.lives):
                asked.lives.append(life)
                return
        self.wrong(f"turn {turn.turn_index} of {life.session_id}: rewound to {length}, not as asked for")

    def was_cut(self, asked: Asked) -> bool:
        """Whether a rewind has cut the turn since it was committed. Its answer is then not told again."""
        return any(
            len(later.before) < len(turn.after)
            for life, turn in zip(asked.lives, asked.committed, strict=True)
            for later in life.turns[turn.turn_index + 1 :]
        )

    def _asks_anew(self, asked: Asked, life: Life, turn: Committed, committed_s: float) -> bool:
        """Whether a second commit of the turn is right: the client has asked again since the first commit, and the
        turn's key is forgotten. A key is known as long as its session, and as long as it belongs to one of the
        session's last turns; turns with and without a client's key are counted apart. If the session was closed before
        anybody heard of the turn, its front end may ask again too. Then it is as if the turn had come after the
        close."""
        later = [each for each in life.turns[turn.turn_index + 1 :] if each.input != asked.tokens]
        alike = [each for each in later if self._is_keyed(each) == asked.keyed]
        forgotten = life.closed_s is not None or len(alike) >= KEPT_ANSWERS
        unheard = life.closed_s is not None and not asked.done
        return forgotten and (unheard or committed_s < asked.tried_s)

    def _is_keyed(self, turn: Committed) -> bool:
        """Whether its client named a key. Front ends give rewinds keys of their own."""
        return bool(turn.input) and self._asked[turn.input[0]].keyed

    def right(self, asked: Asked, life: Life | None, turn_index: int | None) -> tuple[int, ...] | None:
        """The whole output of the turn, if it is turn `turn_index` of that life. None if that is not known."""
        if asked.session_id is None:
            return expected(asked.tokens, asked.most)
        if life is None or turn_index is None or turn_index > len(life.turns):
            return None  # closed meanwhile: nobody knows which life it was
        return self._answer(asked, life, turn_index)

    def _answer(self, asked: Asked, life: Life, turn_index: int | None) -> tuple[int, ...]:
        return expected((*life.history(turn_index), *asked.tokens), asked.most)

    def told(
        self,
        asked: Asked,
        life: Life | None,
        turn_index: int | None,
        output: tuple[int, ...],
        *,
        done: bool,
    ) -> None:
        """A client has read these tokens of a turn, whether or not the turn came to its end.

        An owner may not have heard yet that its session was closed and another of that name was opened. It may give the
        beginning of an answer of the closed session. That answer never ends, because the log refuses it.
        """
        right = self.right(asked, life, turn_index)
        if right is None or output == right[: len(output)]:
            return
        earlier = () if done else self._closed.get(asked.session_id, ())
        if not any(output == self._answer(asked, each, turn_index)[: len(output)] for each in earlier):
            self.wrong(f"number {asked.number}: told {output}, not {right}")

    def finished(
        self, asked: Asked, output: tuple[int, ...], turn_index: int | None, open_key: str | None
    ) -> None:
        """A client was told that the turn is done. `output` has all its tokens; `open_key` names the opening of its
        session."""
        asked.done = True
        self.turns += 1
        if asked.session_id is None:
            if output != expected(asked.tokens, asked.most):
                self.wrong(f"number {asked.number}: done without a session, told {output}")
            return
        if not asked.committed:
            self.wrong(f"number {asked.number}: told as done, and not in the log")
        elif output != asked.committed[-1].output:
            self.wrong(f"number {asked.number}: told {output}, committed {asked.committed[-1].output}")
        elif turn_index != asked.committed[-1].turn_index:
            self.wrong(f"number {asked.number}: told as turn {turn_index}, committed as another")
        elif open_key not in (
            None,
            asked.lives[-1].open_key,
        ):  # a replay names no opening, and is of its own session
            self.wrong(
                f"number {asked.number}: told of session {open_key}, committed in {asked.lives[-1].open_key}"
            )


def expected(history: tuple[int, ...], most: int) -> tuple[int, ...]:
    return tuple(null_generate(history, most, VOCAB_SIZE, eos_probability=EOS_PROBABILITY))
