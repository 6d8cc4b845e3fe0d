"""The generator: one seed gives one dialogue, and evaluation shares nothing with training."""

from itertools import islice

import pytest

from assets.training.dialogues import (
    HELD_OUT_SEED,
    NOT_TOLD,
    Message,
    RecallCase,
    recall_case,
    training_dialogue,
)
from assets.training.facts import KINDS
from assets.training.vocabulary import LISTS, is_held_out


def _first(seed: int, messages: int = 80) -> list[Message]:
    return list(islice(training_dialogue(seed), messages))


def test_one_seed_gives_one_dialogue() -> None:
    assert _first(7) == _first(7)
    assert _first(7) != _first(8)
    assert recall_case(7) == recall_case(7)


def test_users_and_replies_alternate() -> None:
    for seed in range(50):
        roles = [message.role for message in _first(seed) if message.role != "system"]
        assert roles[::2] == ["user"] * len(roles[::2])
        assert roles[1::2] == ["assistant"] * len(roles[1::2])


def test_only_replies_are_learned() -> None:
    messages = [message for seed in range(50) for message in _first(seed)]
    assert {message.role for message in messages if message.learn} == {"assistant"}


def test_training_refuses_held_out_seeds() -> None:
    with pytest.raises(ValueError, match="held-out"):
        next(training_dialogue(HELD_OUT_SEED))


def _made_up_names(texts: list[str]) -> set[str]:
    """The names that are in no list: the words after "is called" that were made up."""
    listed = {word.lower() for words in LISTS.values() for word in words}
    found = set()
    for text in texts:
        _, marker, rest = text.partition(" is called ")
        name = rest.split(".")[0].split()[0].lower() if marker and rest.split() else ""
        if name.isalpha() and name not in listed:
            found.add(name)
    return found


def test_made_up_words_of_training_and_evaluation_are_disjoint() -> None:
    trained = _made_up_names([m.content for seed in range(100) for m in _first(seed) if m.learn])
    evaluated = _made_up_names([text for seed in range(300) for text in recall_case(seed).references])
    assert len(trained) > 50
    assert len(evaluated) > 50
    assert not any(is_held_out(name) for name in trained)
    assert all(is_held_out(name) for name in evaluated)


def test_no_held_out_dialogue_is_a_training_dialogue() -> None:
    def opening(messages: list[str]) -> tuple[str, ...]:
        return tuple(messages[:6])

    trained = {opening([m.content for m in _first(seed, 7) if m.role != "system"]) for seed in range(300)}
    for case in map(recall_case, range(200)):
        turns = [text for pair in zip(case.user_messages, case.references, strict=True) for text in pair]
        assert opening(turns) not in trained


def test_the_fact_is_at_least_ten_turns_away() -> None:
    for case in map(recall_case, range(200)):
        assert case.asked_turn - case.stated_turn > 10
        assert case.asked_turn == len(case.user_messages) - 1


def _last_statement(case: RecallCase) -> int:
    return max(i for i, text in enumerate(case.user_messages) if case.expected in text)


def test_the_question_does_not_hold_the_answer() -> None:
    for case in map(recall_case, range(200)):
        assert case.expected in case.references[-1]
        assert case.expected in case.user_messages[case.stated_turn]
        assert _last_statement(case) < case.asked_turn or case.expected.isdigit()


def test_some_facts_are_updated() -> None:
    updated = [case for case in map(recall_case, range(200)) if case.updated]
    assert 20 < len(updated) < 80


def test_an_untold_fact_is_not_invented() -> None:
    replies = [m.content for seed in range(100) for m in _first(seed)]
    assert replies.count(NOT_TOLD) > 50


def test_no_answer_begins_with_its_value() -> None:
    for kind in KINDS:
        assert " {v}" in kind.answer
        assert kind.statements
        assert kind.questions
