"""Sends one turn and notes when its bytes arrive."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import aiohttp

from serving.cli.client.stream import Chunk, EventSplitter, error_message, parse_event
from serving.cli.load.sample import TurnSample


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn, ready to send."""

    session: int
    turn: int
    url: str
    body: dict[str, object]
    headers: dict[str, str]


async def run_turn(client: aiohttp.ClientSession, turn: TurnRequest) -> TurnSample:
    """Streams the turn to its end. An error of the server becomes the sample's error."""
    body = json.dumps(turn.body).encode()
    headers = {"content-type": "application/json", **turn.headers}
    arrivals: list[tuple[float, bytes]] = []
    started_s = time.perf_counter()
    try:
        async with client.post(turn.url, data=body, headers=headers) as response:
            async for data in response.content.iter_any():
                arrivals.append((time.perf_counter(), data))  # noqa: PERF401  (kept when the stream breaks)
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = type(error).__name__
        return TurnSample(turn.session, turn.turn, started_s, time.perf_counter(), error=reason)
    ended_s = time.perf_counter()
    if not response.ok:
        reason = f"HTTP {response.status}: {_error_text(arrivals)}"
        return TurnSample(turn.session, turn.turn, started_s, ended_s, error=reason)
    return _read_turn(turn, started_s, ended_s, arrivals)


def _read_turn(
    turn: TurnRequest, started_s: float, ended_s: float, arrivals: list[tuple[float, bytes]]
) -> TurnSample:
    try:
        chunks = _parse(arrivals)
    except ValueError as error:
        return TurnSample(turn.session, turn.turn, started_s, ended_s, error=f"bad event: {error}")
    usages = [chunk.usage for _, chunk in chunks if chunk.usage is not None]
    times_s = tuple(at_s for at_s, chunk in chunks if chunk.carries_token)
    errors = [chunk.error for _, chunk in chunks if chunk.error]
    if not errors and not any(chunk.finish_reason for _, chunk in chunks):
        errors.append("stream ended before the turn did")
    if not errors and not times_s:
        errors.append("no token came")
    return TurnSample(
        session=turn.session,
        turn=turn.turn,
        started_s=started_s,
        ended_s=ended_s,
        token_times_s=times_s,
        usage=usages[-1] if usages else None,
        text="".join(chunk.text for _, chunk in chunks),
        token_ids=tuple(token_id for _, chunk in chunks for token_id in chunk.token_ids),
        error=errors[0] if errors else None,
    )


def _parse(arrivals: list[tuple[float, bytes]]) -> list[tuple[float, Chunk]]:
    """Chunks with the arrival time of the bytes that completed them."""
    splitter = EventSplitter()
    chunks = []
    for at_s, data in arrivals:
        for payload in splitter.push(data):
            chunk = parse_event(payload)
            if chunk is not None:
                chunks.append((at_s, chunk))
    return chunks


def _error_text(arrivals: list[tuple[float, bytes]]) -> str:
    body = b"".join(data for _, data in arrivals).decode(errors="replace")
    try:
        return error_message(json.loads(body))[:200]
    except ValueError:
        return body[:200]
