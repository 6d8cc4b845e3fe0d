"""What travels between a client of Redis and a Redis: requests and replies as bytes, in version 3 of its protocol."""

from __future__ import annotations

from typing import Any

from tests.simulation.redis_model import ReplyError, Status

END = b"\r\n"


def parse_requests(data: bytes) -> list[list[bytes]]:
    """All of them; the data holds whole ones only."""
    requests, at = [], 0
    while at < len(data):
        count, at = _number(data, at)
        words = []
        for _ in range(count):
            size, at = _number(data, at)
            words.append(data[at : at + size])
            at += size + len(END)
        requests.append(words)
    return requests


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Of a line that begins with the kind of what it counts; and where the next line begins."""
    end = data.index(END, at)
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
