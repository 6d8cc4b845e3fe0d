"""A constraint whose allowed tokens a test can compute."""

from __future__ import annotations

from collections.abc import Sequence

from tests.unit.engine.driver import VOCAB


class Ladder:
    """A TokenConstraint. At step i it allows `rungs[i]` tokens, which follow from the sum of the tokens before. The
    output may end after `may_end_at` tokens. With `endless` it goes on past the last rung, with as many choices as on
    that rung."""

    def __init__(self, rungs: Sequence[int], *, may_end_at: int | None = None, endless: bool = False) -> None:
        self.rungs = rungs
        self.accepted: list[int] = []
        self._may_end_at = len(rungs) if may_end_at is None else may_end_at
        self._endless = endless
        self.fault: tuple[int, BaseException] | None = None

    @property
    def holds(self) -> bool:
        return True

    @property
    def may_end(self) -> bool:
        return len(self.accepted) >= self._may_end_at

    @property
    def complete(self) -> bool:
        return not self._endless and len(self.accepted) == len(self.rungs)

    def allowed(self) -> bytes:
        return mask(self.choices())

    def accept(self, token_id: int) -> None:
        assert token_id in self.choices()
        self.accepted.append(token_id)
        if self.fault is not None and self.fault[0] == len(self.accepted):
            raise self.fault[1]

    def choices(self) -> list[int]:
        count = self.rungs[min(len(self.accepted), len(self.rungs) - 1)]
        first = sum(self.accepted) * 7
        return [1 + (first + 3 * index) % (VOCAB - 1) for index in range(count)]


def mask(token_ids: Sequence[int]) -> bytes:
    bits = sum(1 << token_id for token_id in set(token_ids))
    return bits.to_bytes(-(-VOCAB // 8), "little")
