"""The stream of GET /v1/kedge/watch: the state of the cluster at every interval, and events in between."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from serving.cli.client.server import ServerError, refused, unreachable
from serving.cli.client.stream import error_message

WATCH_PATH = "/v1/kedge/watch"
STATE = "state"
HAPPENED = "event"
FAILED = "error"
"""The event with which a broken stream ends, in the shape of an error reply."""
CONNECT_TIMEOUT_S = 5.0
PATIENCE_S = 10.0
"""A stream that sends nothing for this long, plus its interval, counts as broken."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """`name` is STATE or HAPPENED; other names may come and must be ignored."""

    name: str
    data: dict[str, Any]


def watch(client: httpx.Client, interval_s: float) -> Iterator[WatchEvent]:
    """Events as they come, without end. Raises ServerError if the stream is refused or breaks off."""
    timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=PATIENCE_S + interval_s)
    try:
        with client.stream(
            "GET", WATCH_PATH, params={"interval_s": f"{interval_s:g}"}, timeout=timeout
        ) as response:
            if response.is_error:
                response.read()
                raise refused(response)
            for event in events_in(response.iter_lines()):
                if event.name == FAILED:
                    raise ServerError(error_message(event.data))
                yield event
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(str(client.base_url), error) from error
    except ValueError as error:
        raise ServerError(f"{WATCH_PATH} said what is no event: {error}") from error
    raise ServerError(f"{client.base_url} ended the stream")


def events_in(lines: Iterable[str]) -> Iterator[WatchEvent]:
    """The server-sent events in `lines`; an empty line ends an event. Raises ValueError if one is not a JSON object."""
    name, data = "", []
    for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif not line and data:
            body = json.loads("\n".join(data))
            if not isinstance(body, dict):
                raise ValueError(f"not an object: {data[0][:80]}")
            yield WatchEvent(name, body)
            name, data = "", []
