"""Calls every operation of the served OpenAPI document with what schemathesis makes up, and checks the replies."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.unit.serving.served_service import REPLY_PATIENCE_S, ServedService

DOCUMENTED = [status_code_conformance, content_type_conformance, response_schema_conformance]
MOST_OPTIONAL_FIELDS = 4
"""A made-up body has most of the possible fields, and so nearly always one that is refused. Most bodies therefore keep
only this many optional fields."""
SOUND: dict[str, Any] = {
    "input": "hello",
    "messages": [{"role": "user", "content": "hello"}],
    "prompt": "hello",
    "text": "hello",
    "tokens": [5, 6],
    "rid": "a",
    "length": 0,
}
"""Inputs that the model can use. Most that schemathesis makes up is not text, or not tokens of the model. A body gets
the first of these that it has a field for."""

LAST_OPERATIONS = ("DELETE", "/drain")
"""These operations take away what other operations work on, so they come at the end of a round."""
UNAVAILABLE = {("POST /v1/kedge/sessions/{session_id}/move", 503)}
"""Replies that are no fault: with a single replica, a session has nowhere to move to."""
ENDLESS = "GET /v1/kedge/watch"
"""This stream ends only when it is asked to."""
KNOWN_NAMES = ("a", "b")
"""The ids of sessions that calls share."""
MOST_KNOWN = 12
LIKELY = 0.8


class OperationCalls:
    """Calls the operations of a service. `cases` counts the calls by operation and status. `findings` are the faults,
    each once. `known` are ids from replies: later calls name them, so that they reach sessions and responses that
    exist."""

    def __init__(self, served: ServedService) -> None:
        self.cases: Counter[tuple[str, int]] = Counter()
        self.findings: dict[str, str] = {}
        self.known = list(KNOWN_NAMES)
        self._never_wrong: set[tuple[str, schemathesis.GenerationMode]] = set()
        """Operations of which no invalid call can be made up."""
        self._served = served
        self._http = requests.Session()
        # The server may close a kept connection just when the next call is sent.
        self._http.headers["connection"] = "close"
        document = schemathesis.openapi.from_url(f"{served.address}/openapi.json")
        operations = [found.ok() for found in document.get_all_operations()]
        self._operations = sorted(operations, key=_is_last)
        self._bodies = {each.label: _body_schema(document.raw_schema, each) for each in operations}

    @property
    def labels(self) -> list[str]:
        return [operation.label for operation in self._operations]

    def round(self, number: int, cases: int) -> None:
        """Makes up to `cases` valid and as many invalid calls of each operation. The same `number` makes the same
        calls."""
        for operation in self._operations:
            for mode in schemathesis.GenerationMode:
                if (operation.label, mode) not in self._never_wrong:
                    self._call_many(operation, mode, number, cases)

    def _call_many(self, operation: Any, mode: schemathesis.GenerationMode, number: int, cases: int) -> None:
        positive = mode is schemathesis.GenerationMode.POSITIVE

        @seed(f"{operation.label} {mode} {number}")
        @settings(
            max_examples=cases,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode), st.randoms(use_true_random=False))
        def call(case: Any, random: Random) -> None:
            if positive:
                self._make_likely(case, random)
            self._call(case)

        try:
            call()
        except Unsatisfiable:
            assert not positive, f"{operation.label}: nothing valid can be made up"
            self._never_wrong.add((operation.label, mode))

    def _make_likely(self, case: Any, random: Random) -> None:
        """Changes most valid calls so that they get past the first check."""
        if isinstance(case.body, dict) and random.random() < LIKELY:
            schema = self._bodies[case.operation.label]
            needed = case.body.keys() & set(schema.get("required", ()))
            others = sorted(case.body.keys() - needed - {"model", "input_ids", *SOUND})
            few = random.sample(others, min(len(others), random.randint(0, MOST_OPTIONAL_FIELDS)))
            case.body = {name: value for name, value in case.body.items() if name in needed or name in few}
            sound = next((name for name in SOUND if name in schema["properties"]), None)
            if sound is not None and (sound not in needed or random.random() < LIKELY):
                case.body[sound] = SOUND[sound]
        for name in case.path_parameters or {}:
            if random.random() < LIKELY:
                case.path_parameters[name] = random.choice(self.known[-MOST_KNOWN:])
        for name in list(case.headers or {}):
            if name == "x-session-id" and random.random() < LIKELY:
                case.headers[name] = random.choice(self.known[-MOST_KNOWN:])
            elif random.random() < LIKELY:
                del case.headers[name]

    def _call(self, case: Any) -> None:
        label = case.operation.label
        if label == ENDLESS:
            case.query = dict(case.query or {}) | {"count": 1}
        try:
            reply = case.call(base_url=self._served.address, session=self._http, timeout=REPLY_PATIENCE_S)
        except requests.RequestException as error:
            self._found(label, f"no reply: {error!r}"[:400], case)
            return
        self.cases[label, reply.status_code] += 1
        if reply.status_code >= 500 and (label, reply.status_code) not in UNAVAILABLE:
            self._found(label, f"{reply.status_code} {reply.text[:200]}", case)
        try:
            case.validate_response(reply, checks=DOCUMENTED)
        except FailureGroup as group:
            for failure in group.exceptions:
                self._found(label, f"{reply.status_code} {type(failure).__name__}: {failure}"[:400], case)
        for fault in faults_in(reply.headers.get("content-type", [""])[0], reply.content):
            self._found(label, fault, case)
        self._learn(reply)

    def _found(self, label: str, what: str, case: Any) -> None:
        self.findings.setdefault(f"{label}: {what}", case.as_curl_command()[:2000])

    def _learn(self, reply: Any) -> None:
        """Remembers the id that a reply contains."""
        if reply.status_code >= 300 or reply.headers.get("content-type") != ["application/json"]:
            return
        told = reply.json()
        named = (
            told
            if isinstance(told, str)
            else isinstance(told, dict) and (told.get("session_id") or told.get("id"))
        )
        if isinstance(named, str) and named and named.isascii() and named.isprintable():
            self.known.append(named)


def faults_in(content_type: str, content: bytes) -> list[str]:
    """The faults of a stream. It must end properly, and not with an internal error of the server."""
    if not content_type.startswith("text/event-stream"):
        return []
    faults = []
    if b"internal error" in content:
        faults.append(f"a stream has an internal error: {content[-300:]!r}")
    if not content.endswith(b"\n\n"):
        faults.append(f"a stream ends in mid-event: {content[-100:]!r}")
    return faults


def _is_last(operation: Any) -> bool:
    return any(word in operation.label for word in LAST_OPERATIONS)


def _body_schema(document: dict[str, Any], operation: Any) -> dict[str, Any]:
    described = document["paths"][operation.path][operation.method]
    if "requestBody" not in described:
        return {}
    name = described["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schema: dict[str, Any] = document["components"]["schemas"][name]
    return schema
