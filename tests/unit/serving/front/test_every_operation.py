"""Every operation that the served OpenAPI document names, called with what schemathesis makes up for it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.serving.operation_calls import OperationCalls
from tests.unit.serving.sdk_clients import http_at
from tests.unit.serving.served_service import ServedService, served_service

CASES = 3
"""How many valid and how many invalid calls of each operation a round makes. A round costs some 9 s of CPU time."""
LONG_RUN_S = 20.0
GENERATING = {
    f"POST {path}"
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate")
}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedService]:
    with served_service(tmp_path) as served:
        yield served


def test_every_operation_answers_whatever_it_is_sent(served: ServedService) -> None:
    calls = OperationCalls(served)
    calls.round(0, CASES)
    _check(calls, served)
    assert {label for label, status in calls.cases if status == 200} >= GENERATING, "what is valid is not"


@pytest.mark.slow
@pytest.mark.waits
def test_every_operation_answers_for_long(served: ServedService) -> None:
    number = secrets.randbelow(2**32)
    print(f"rounds from {number} on")  # noqa: T201 - after a failure, the number repeats the calls
    calls = OperationCalls(served)
    began = time.monotonic()
    while time.monotonic() - began < LONG_RUN_S:
        calls.round(number, CASES)
        number += 1
    _check(calls, served)


def _check(calls: OperationCalls, served: ServedService) -> None:
    print(f"{calls.cases.total()} calls")  # noqa: T201
    assert not calls.findings, "\n".join(f"{what}\n    {how}" for what, how in calls.findings.items())
    assert {label for label, _ in calls.cases} == set(calls.labels)
    served.run(_is_well(served))


async def _is_well(served: ServedService) -> None:
    """Checks that the books are right, that a turn works, and that all is free once sessions are closed."""
    service = served.service
    async with http_at(served.address, timeout=20.0) as client:
        assert (await client.get("/v1/kedge/audit")).json()["clean"]
        turn = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        reply = await client.post("/v1/chat/completions", json=turn, headers={"x-session-id": "afterwards"})
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] > 0
        assert len(service.calls) == service.ended
