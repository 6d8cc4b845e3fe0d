"""Short runs of the state machine: the same examples each time, and new random ones. `python -m
tests.property.run_machine` makes long runs."""

from __future__ import annotations

import random
import sys

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.run_machine import run_batch
from tests.property.session_machine import SessionMachine

FIXED_EXAMPLES = 120
FRESH_EXAMPLES = 60
STEPS = 50


def test_any_order_of_events_keeps_the_books_and_every_turn_exact() -> None:
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(
            max_examples=FIXED_EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=True,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_so_does_an_order_that_nobody_has_tried() -> None:
    """To repeat a failure, call run_batch(SEED, FRESH_EXAMPLES, STEPS)."""
    seed = random.SystemRandom().randrange(2**32)
    sys.stderr.write(f"seed {seed}\n")
    run_batch(seed, FRESH_EXAMPLES, STEPS)
