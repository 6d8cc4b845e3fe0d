"""The cost of recognizing whole conversations: hashing a body beside parsing it, and an index of a million places.

    python -m benchmarks.in_process.recognition_cost --json recognition_cost.json

Parsing is everything that turns a chat's bytes into a call: JSON, the schema, the messages as templates take them.
Hashing is the cost that recognition adds. Times are CPU time; each round measures both (A B A B), and medians count.
The index is filled turn by turn. Then calls of conversations of ten turns are looked up in random order, some known to
it and some unknown. Its memory is what the process grew by, and what Python allocated for it in a second run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table
from starlette.types import Message

from benchmarks.measure import save_record
from engine.api import SamplingParams
from serving.cli.load.prompts import PromptSource
from serving.front.api.openai.chat_schema import ChatBody
from serving.front.api.rules import ApiRules
from serving.front.api.strict_json import StrictJsonRequest
from serving.front.known_places import DIGEST_BYTES, KnownPlaces
from serving.wire.turns import ChatPrompt, Said, TurnCall

SIZES = (5_000, 20_000, 40_000, 100_000, 400_000)
WORDS_A_MESSAGE = 160
ROUNDS = 60
PLACES = 1_000_000
TURNS = 10
LOOKUPS = 50_000
REPLICAS = tuple(f"replica-{number}" for number in range(8))
APP = SimpleNamespace(state=SimpleNamespace(rules=ApiRules()))


@dataclass(frozen=True, slots=True)
class BodyCost:
    """Nanoseconds per byte of a body."""

    size_bytes: int
    messages: int
    parse_ns: float
    hash_ns: float


@dataclass(frozen=True, slots=True)
class IndexCost:
    """Microseconds to look up a call and one place of it; milliseconds to forget a lost replica."""

    places: int
    resident_bytes_a_place: float
    allocated_bytes_a_place: float
    known_call_us: float
    unknown_call_us: float
    place_us: float
    forget_replica_ms: float


def body_of(size_bytes: int) -> bytes:
    prompts, messages = PromptSource(size_bytes, 4096), list[dict[str, str]]()
    while len(body := json.dumps({"messages": messages, "max_tokens": 16}).encode()) < size_bytes:
        role = ("user", "assistant")[len(messages) % 2]
        messages.append({"role": role, "content": prompts.words(0, len(messages), WORDS_A_MESSAGE)})
    return body


async def parsed(body: bytes) -> TurnCall:
    """Parses as the front end does, but without the thread that checks large bodies."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    value = await StrictJsonRequest({"type": "http", "headers": [], "app": APP}, receive).json()
    chat = ChatBody.model_validate(value)
    return call_of(ChatPrompt(tuple(message.for_template() for message in chat.messages)))


def call_of(prompt: ChatPrompt) -> TurnCall:
    return TurnCall("r", prompt, SamplingParams())


async def body_cost(size_bytes: int) -> BodyCost:
    body, front_end = body_of(size_bytes), KnownPlaces(1)
    parse_s, hash_s = [], []
    for _ in range(ROUNDS):
        begun_s = time.thread_time()
        call = await parsed(body)
        parsed_s = time.thread_time()
        front_end.recognized(call)
        parse_s.append(parsed_s - begun_s)
        hash_s.append(time.thread_time() - parsed_s)
    costs = (1e9 * statistics.median(times_s) / len(body) for times_s in (parse_s, hash_s))
    messages = json.loads(body)["messages"]
    return BodyCost(len(body), len(messages), *costs)


def conversation(number: int) -> list[bytes]:
    """The digests of a conversation's places."""
    rng = random.Random(number)
    return [rng.randbytes(DIGEST_BYTES) for _ in range(TURNS)]


def at_turn(digests: Sequence[bytes], turn: int) -> TurnCall:
    messages = tuple({"role": ("user", "assistant")[at % 2], "content": ""} for at in range(2 * turn + 1))
    said = tuple(Said(2 * at + 1, digest) for at, digest in enumerate(digests[: turn + 1]))
    return call_of(ChatPrompt(messages, said=said))


def filled() -> KnownPlaces:
    """An index of PLACES places, TURNS for each conversation. Every digest is an object of its own."""
    front_end = KnownPlaces(PLACES)
    for number in range(PLACES // TURNS):
        digests, replica_id = conversation(number), REPLICAS[number % len(REPLICAS)]
        for turn in range(TURNS):
            front_end.note(at_turn(digests, turn), replica_id)
    assert len(front_end) == PLACES
    return front_end


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def allocated_bytes() -> int:
    tracemalloc.start()
    kept = filled()
    gc.collect()
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept) == PLACES
    return size_bytes


def once_us(calls: Sequence[TurnCall], action: Callable[[TurnCall], Any]) -> float:
    """CPU time of one call, median over ten parts of the calls."""
    each = len(calls) // 10
    times_s = []
    for start in range(0, len(calls), each):
        begun_s = time.thread_time()
        for call in calls[start : start + each]:
            action(call)
        times_s.append((time.thread_time() - begun_s) / each)
    return 1e6 * statistics.median(times_s)


def index_cost() -> IndexCost:
    before_bytes = resident_bytes()
    front_end = filled()
    grown_bytes = resident_bytes() - before_bytes
    rng = random.Random(1)
    numbers = rng.choices(range(PLACES // TURNS), k=LOOKUPS)
    known = [at_turn(conversation(number), TURNS - 1) for number in numbers]
    unknown = [at_turn(conversation(PLACES + number), TURNS - 1) for number in numbers]
    assert all(front_end.affinity(call).holder for call in known[:100])
    assert not any(front_end.affinity(call).holder for call in unknown[:100])
    known_us, unknown_us = once_us(known, front_end.affinity), once_us(unknown, front_end.affinity)
    begun_s = time.thread_time()
    front_end.forget_replica(REPLICAS[0])
    forgotten_ms = 1e3 * (time.thread_time() - begun_s)
    return IndexCost(
        places=PLACES,
        resident_bytes_a_place=grown_bytes / PLACES,
        allocated_bytes_a_place=allocated_bytes() / PLACES,
        known_call_us=known_us,
        unknown_call_us=unknown_us,
        place_us=(unknown_us - known_us) / (TURNS - 1),
        forget_replica_ms=forgotten_ms,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    index = index_cost()  # first, so that its memory is not that of the bodies below
    bodies = [asyncio.run(body_cost(size_bytes)) for size_bytes in SIZES]
    table = Table("body, KB", "messages", "parsing, ns a byte", "hashing, ns a byte")
    for cost in bodies:
        table.add_row(
            f"{cost.size_bytes / 1e3:.0f}", f"{cost.messages}", f"{cost.parse_ns:.2f}", f"{cost.hash_ns:.2f}"
        )
    console = Console(width=110)
    console.print(table)
    for name, value in asdict(index).items():
        console.print(f"{name.replace('_', ' ')}: {value:,.2f}")
    save_record(args.json, bodies=[asdict(cost) for cost in bodies], index=asdict(index))


if __name__ == "__main__":
    main()
