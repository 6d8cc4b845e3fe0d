"""The bytes between a client of Redis and a Redis: requests and replies in version 3 of the protocol (RESP3)."""

from __future__ import annotations

from typing import Any

from tests.simulation.redis_model import ReplyError, Status

END = b"\r\n"


def parse_requests(data: bytes) -> tuple[list[list[bytes]], bytes]:
    """All complete requests, and the beginning of the next. A client sends a long request in pieces."""
    requests: list[list[bytes]] = []
    at = 0
    try:
        while at < len(data):
            request, end = _request(data, at)
            requests.append(request)
            at = end
    except _Unfinished:
        pass
    return requests, data[at:]


class _Unfinished(Exception):
    """The rest of the request has not arrived yet."""


def _request(data: bytes, at: int) -> tuple[list[bytes], int]:
    count, at = _number(data, at)
    words = []
    for _ in range(count):
        size, at = _number(data, at)
        end = at + size + len(END)
        if end > len(data):
            raise _Unfinished
        words.append(data[at : at + size])
        at = end
    return words, at


def _number(data: bytes, at: int) -> tuple[int, int]:
    """The number in a line that begins with one type character, and where the next line begins."""
    end = data.find(END, at)
    if end < 0:
        raise _Unfinished
    return int(data[at + 1 : end]), end + len(END)


def packed(reply: Any) -> bytes:
    match reply:
        case None:
            return b"_" + END
        case ReplyError():
            return b"-" + str(reply).replace("\n", " ").encode() + END
        case Status():
            return b"+" + reply + END
        case bytes():
            return b"$%d" % len(reply) + END + reply + END
        case int():
            return b":%d" % reply + END
        case float():
            return b",%.17g" % reply + END
        case dict():
            pairs = [packed(word) for pair in reply.items() for word in pair]
            return b"%%%d" % len(reply) + END + b"".join(pairs)
        case list():
            return b"*%d" % len(reply) + END + b"".join(map(packed, reply))
    raise AssertionError(reply)
