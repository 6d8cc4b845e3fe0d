"""A short, repeatable run of the state machine. `python -m tests.property.run_machine` runs it for long."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.session_machine import SessionMachine

EXAMPLES = 120
STEPS = 50


def test_any_order_of_events_keeps_the_books_and_every_turn_exact() -> None:
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=True,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
