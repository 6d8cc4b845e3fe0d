"""Kinds of facts and single facts. The texts are in ``text/facts.toml``."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from assets.training.vocabulary import LISTS, Draw, load


@dataclass(frozen=True)
class FactKind:
    """Templates and values of one kind. If ``subjects`` is empty, subjects are random names."""

    name: str
    weight: float
    subjects: tuple[str, ...]
    values: Mapping[str, Any]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Fact:
    kind: FactKind
    subject: str
    value: str

    @property
    def key(self) -> tuple[str, str]:
        """The key of the fact. A later statement with the same key replaces it."""
        return (self.kind.name, self.subject)

    @property
    def answer(self) -> str:
        return self.kind.answer.format(s=self.subject, v=self.value)

    def statement(self, draw: Draw) -> str:
        return draw.one_of(self.kind.statements).format(s=self.subject, v=self.value)

    def question(self, draw: Draw) -> str:
        return draw.one_of(self.kind.questions).format(s=self.subject)

    def lower(self) -> "Fact":
        return Fact(self.kind, self.subject.lower(), self.value.lower())


def _kinds() -> Iterator[FactKind]:
    for entry in load("facts.toml")["kind"]:
        texts = (tuple(entry["statements"]), tuple(entry["questions"]), entry["answer"])
        if "each" in entry:
            for subject, values in entry["each"].items():
                yield FactKind(f"{entry['name']} {subject}", entry["weight"], (subject,), values, *texts)
        else:
            subjects = tuple(entry.get("subjects", ()))
            yield FactKind(entry["name"], entry["weight"], subjects, entry["values"], *texts)


KINDS = tuple(_kinds())
_WEIGHTS = tuple(kind.weight for kind in KINDS)


def draw_fact(draw: Draw, kind: FactKind | None = None) -> Fact:
    """A random fact, of any kind unless one is given."""
    kind = kind or draw.rng.choices(KINDS, _WEIGHTS)[0]
    subjects = kind.subjects
    subject = draw.one_of(subjects) if subjects else draw.mixed(LISTS["first_names"], draw.name, 0.3)
    return Fact(kind, subject, draw.value(kind.values))


def with_new_value(draw: Draw, fact: Fact) -> Fact:
    """The same fact after an update: another value."""
    for _ in range(20):
        value = draw.value(fact.kind.values)
        if value != fact.value:
            return Fact(fact.kind, fact.subject, value)
    return fact
