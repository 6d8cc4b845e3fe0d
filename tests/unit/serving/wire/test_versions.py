"""The controller reads records of the version before and of the next version. Versions further apart are refused. For
records between front ends and replicas see test_calls.py.

`recorded/wire_version_1.json` holds records as version 1 pickled them, in base64. `wire_version_1_fields.json` holds
the names of their fields.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ray import cloudpickle

from controllers import records, settings
from controllers.records import (
    Assignment,
    ForkOrder,
    HeartbeatReply,
    LedgerEntry,
    ReplicaStatus,
    SessionRecord,
    SessionStatus,
    StoredResult,
    TurnRecord,
)
from controllers.settings import (
    ClusterSettings,
    Deployment,
    RebalancingSettings,
    RedisLogSettings,
    SqliteLogSettings,
)
from controllers.tokens import encode_tokens
from controllers.wire_record import ABSENT, WIRE_VERSION, wire_record
from engine.api import SamplingParams
from serving.front.api.errors import retry_headers
from serving.wire.turns import TokenPrompt, TurnCall
from serving.wire.versions import UNKNOWN_CALL, mismatch

RECORDINGS = Path(__file__).parent / "recorded"
RECORDED = json.loads((RECORDINGS / "wire_version_1.json").read_text())
FIELDS_OF_VERSION_1 = json.loads((RECORDINGS / "wire_version_1_fields.json").read_text())
TRAVELLING = [records, settings]
SENT_BY_VERSION_1 = {
    "session_record": SessionRecord(
        "s",
        "t",
        2,
        "a",
        encode_tokens([1, 2]),
        1,
        30.0,
        99,
        5.0,
        (StoredResult("k", 0, b"r", "d"),),
        "o",
        "tools",
    ),
    "turn_record": TurnRecord("s", 2, 1, 2, encode_tokens([3]), 1, "k", b"r", "d", "tools"),
    "fork_order": ForkOrder("c", "fk", 2, 9.0),
    "assignment": Assignment("s", "a", 2, True),
    "ledger_entry": LedgerEntry(
        "s",
        "t",
        "a",
        2,
        2,
        1,
        created_s=5.0,
        last_used_s=6.0,
        size_bytes=7,
        in_turn=True,
        reported_s=8.0,
        timeout_s=30.0,
        capacity_tokens=99,
        open_key="o",
    ),
    "replica_status": ReplicaStatus("a", 10, 20, 1, 2, 3, draining=True, seen_s=4.0),
    "session_status": SessionStatus("s", 2, 2, 1, 0.5, True, True, 7),
    "heartbeat_reply": HeartbeatReply(True, ("s",), True),
    "deployment": Deployment(
        "d",
        ClusterSettings(
            replica_timeout_s=4.0,
            session_timeout_s=5.0,
            max_sessions=6,
            placement_tokens=7,
            rebalancing=RebalancingSettings(min_gap=8.0, tokens_per_s=9.0),
        ),
        SqliteLogSettings("p", full_sync=True),
    ),
    "redis_log": RedisLogSettings("u", "n"),
}


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_records_of_the_version_before_are_read(name: str) -> None:
    """A record that lacked a field used to raise AttributeError where the field was first read."""
    read = cloudpickle.loads(base64.b64decode(RECORDED[name]))
    assert read == SENT_BY_VERSION_1[name]
    assert cloudpickle.loads(cloudpickle.dumps(read)) == read


@wire_record
@dataclass(frozen=True, slots=True)
class Older:
    name: str
    number: int = 1


@wire_record
@dataclass(frozen=True, slots=True)
class Newer:
    name: str
    number: int = 1
    added: int = 5
    made: list[int] = field(default_factory=list)
    told: int = field(default=2, metadata={ABSENT: 1})


@wire_record
@dataclass(frozen=True, slots=True)
class Whole:
    name: str
    number: int
    added: int


def as_another_version(record: Any, kind: type) -> Any:
    """Pickles the record, and reads it as a process would in which its class is `kind`."""
    sent = cloudpickle.dumps(record)
    own, other = type(record).__name__.encode(), kind.__name__.encode()
    assert sent.count(own) == 1
    assert len(own) == len(other)
    return cloudpickle.loads(sent.replace(own, other))


def test_what_is_missing_is_filled_in_and_what_is_new_is_left_out() -> None:
    read = as_another_version(Older("n", 3), Newer)
    assert read == Newer("n", 3, 5, [], 1)
    assert read.made is not as_another_version(Older("n", 3), Newer).made
    assert as_another_version(Newer("n", 3, 9, [4], 7), Older) == Older("n", 3)


def test_a_missing_field_without_a_default_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="a Whole of another version has no added"):
        as_another_version(Older("n", 3), Whole)


def dataclasses_of(module: ModuleType) -> dict[str, Any]:
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and is_dataclass(kind)]
    return {f"{kind.__module__}.{kind.__name__}": kind for kind in kinds}


@pytest.mark.parametrize("module", TRAVELLING, ids=lambda module: module.__name__)
def test_everything_that_travels_can_be_read_by_the_versions_beside_this_one(module: ModuleType) -> None:
    kinds = dataclasses_of(module)
    assert len(kinds) > 3
    for name, kind in kinds.items():
        assert kind.__setstate__.__module__ == "controllers.wire_record", f"{name} is no wire_record"


@pytest.mark.parametrize("name", sorted(FIELDS_OF_VERSION_1))
def test_fields_are_only_added_at_the_end(name: str) -> None:
    """A field that was added in the middle took the values of those after it. A controller then took the placement's
    tokens for `rebalancing`, and a replica's time for the age of its step."""
    (kind,) = {kinds[name] for kinds in map(dataclasses_of, TRAVELLING) if name in kinds}
    theirs = FIELDS_OF_VERSION_1[name]
    assert [each.name for each in fields(kind)][: len(theirs)] == theirs


def test_versions_beside_each_other_are_understood() -> None:
    for theirs in (WIRE_VERSION - 1, WIRE_VERSION, WIRE_VERSION + 1):
        assert mismatch(theirs) is None


@pytest.mark.parametrize("theirs", [WIRE_VERSION - 2, WIRE_VERSION + 2])
def test_versions_further_apart_are_refused_by_name(theirs: int) -> None:
    refusal = mismatch(theirs)
    assert refusal is not None
    assert (refusal.status, refusal.code) == (503, "version_mismatch")
    assert f"front end speaks version {theirs}" in refusal.message


def test_an_error_that_ends_with_the_update_says_when_to_try_again() -> None:
    """Clients got a 503 without `retry-after`."""
    for refusal in (mismatch(WIRE_VERSION + 2), UNKNOWN_CALL):
        assert refusal is not None
        assert retry_headers(refusal) == {"retry-after": "1"}


def test_calls_tell_their_version() -> None:
    assert TurnCall("r", TokenPrompt((1,)), SamplingParams()).wire_version == WIRE_VERSION
