"""Attacks on a server through its connections: `hostile_connections.py NAME HOST PORT SCALE`.

An attack goes on until its standard input ends. Then it prints as JSON how often each outcome happened. SCALE
multiplies the number of connections.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

READERS = 16
SENDERS = 500
FLOODERS = 20
HALF_OPEN = 10_000
TURNS = 500
PER_ADDRESS = 5_000
"""Connections from one address of the loopback network, which has about 28,000 ports."""

OPENED_AT_ONCE = 200
FLOOD_BYTES = 64 * 2**20
"""Bytes of a request whose headers do not end."""

BIG_STREAM = {
    "input_ids": [7] * 400,
    "stream": True,
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 20,
    "sampling_params": {"max_new_tokens": 64, "ignore_eos": True},
}
"""Every event repeats all log-probabilities so far: some megabytes for each token."""


class Attack:
    """The connections of one attack, and what became of them."""

    def __init__(self, host: str, port: int, scale: float) -> None:
        self.counts: Counter[str] = Counter()
        self._host = host
        self._port = port
        self._scale = scale
        self._opening = asyncio.Semaphore(OPENED_AT_ONCE)

    def number(self, whole: int) -> int:
        return max(1, round(whole * self._scale))

    async def side_by_side(self, count: int, one: Callable[[int], Awaitable[None]]) -> None:
        async def counted(index: int) -> None:
            try:
                await one(index)
            except OSError as error:
                self.counts[type(error).__name__] += 1

        await asyncio.gather(*map(counted, range(count)))

    async def connect(self, index: int = 0) -> socket.socket:
        """Opens a connection. Every PER_ADDRESS connections come from an address of their own."""
        client = socket.socket()
        client.setblocking(False)
        client.bind((f"127.0.1.{1 + index // PER_ADDRESS}", 0))
        async with self._opening:
            try:
                async with asyncio.timeout(10.0):
                    await asyncio.get_running_loop().sock_connect(client, (self._host, self._port))
            except TimeoutError:
                client.close()
                raise OSError("no connection") from None
        self.counts["opened"] += 1
        return client

    async def send(self, client: socket.socket, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(client, data)

    async def answered(self, client: socket.socket) -> None:
        """Waits for an answer or the end of the connection, and counts it."""
        answer = await asyncio.get_running_loop().sock_recv(client, 4096)
        self.counts[answer[9:12].decode(errors="replace") if answer else "cut"] += 1


def head(path: str, *lines: str) -> bytes:
    first = (
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        "x-tenant-id: hostile",
    )
    return "\r\n".join((*first, *lines, "", "")).encode()


def call(path: str, body: dict[str, Any], *lines: str) -> bytes:
    content = json.dumps(body).encode()
    return head(path, f"content-length: {len(content)}", *lines) + content


async def never_read(attack: Attack) -> None:
    """Opens large streams and reads nothing of them."""

    async def one(index: int) -> None:
        with await attack.connect(index) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await attack.send(client, call("/generate", BIG_STREAM))
            await asyncio.Event().wait()

    await attack.side_by_side(attack.number(READERS), one)


async def read_at_once(attack: Attack) -> None:
    """No attack: reads the same streams as they come. They cost the server the same computation as unread ones."""

    async def one(index: int) -> None:
        loop = asyncio.get_running_loop()
        with await attack.connect(index) as client:
            await attack.send(client, call("/generate", BIG_STREAM, "connection: close"))
            while await loop.sock_recv(client, 2**16):
                pass
            attack.counts["read"] += 1

    await attack.side_by_side(attack.number(READERS), one)


async def send_slowly(attack: Attack) -> None:
    """Sends bodies at a byte a second."""

    async def one(index: int) -> None:
        with await attack.connect(index) as client:
            await attack.send(client, head("/v1/chat/completions", "content-length: 100000"))
            answer = asyncio.create_task(attack.answered(client))
            try:
                while not answer.done():
                    await attack.send(client, b" ")
                    await asyncio.sleep(1.0)
            finally:
                answer.cancel()

    await attack.side_by_side(attack.number(SENDERS), one)


async def flood_headers(attack: Attack) -> None:
    """Sends headers of 64 KiB, headers of thousands of lines, and headers without an end, again and again."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    large = call("/v1/chat/completions", body, "x-large: " + "a" * 2**16)
    many = call("/v1/chat/completions", body, *(f"x-line-{n}: a" for n in range(5000)))

    async def one(index: int) -> None:
        while True:
            with await attack.connect(index) as client:
                if index % 4 == 3:
                    await _flood(attack, client)
                else:
                    await attack.send(client, many if index % 2 else large)
                    await attack.answered(client)
            await asyncio.sleep(0.2)

    async def again(index: int) -> None:
        while True:
            try:
                await one(index)
            except OSError as error:
                attack.counts[type(error).__name__] += 1
                await asyncio.sleep(0.2)

    await attack.side_by_side(attack.number(FLOODERS), again)


async def _flood(attack: Attack, client: socket.socket) -> None:
    await attack.send(client, head("/v1/chat/completions")[:-2])
    for number in range(FLOOD_BYTES // 2**16):
        await attack.send(client, f"x-more-{number}: ".encode() + b"a" * 2**16 + b"\r\n")
        attack.counts["flooded_64_KiB"] += 1
        await asyncio.sleep(0.02)


async def half_open(attack: Attack) -> None:
    """Opens thousands of connections and sends nothing on them, or half of a line."""

    async def one(index: int) -> None:
        with await attack.connect(index) as client:
            if index % 2:
                await attack.send(client, b"POST /v1/chat/comple")
            await attack.answered(client)

    await attack.side_by_side(attack.number(HALF_OPEN), one)


async def many_turns(attack: Attack) -> None:
    """Keeps hundreds of turns of one client in flight at all times."""
    body = {"prompt": [7] * 64, "max_tokens": 64, "ignore_eos": True}

    async def one(index: int) -> None:
        while True:
            with await attack.connect(index) as client:
                await attack.send(client, call("/v1/completions", body))
                await attack.answered(client)
            await asyncio.sleep(0.2)

    await attack.side_by_side(attack.number(TURNS), one)


ATTACKS: dict[str, Callable[[Attack], Coroutine[None, None, None]]] = {
    "never read": never_read,
    "the same, read": read_at_once,
    "send slowly": send_slowly,
    "flood headers": flood_headers,
    "half open": half_open,
    "many turns": many_turns,
}


async def until_told(name: str, host: str, port: int, scale: float) -> Counter[str]:
    """Runs the attack until standard input ends; returns its counts."""
    attack = Attack(host, port, scale)
    task = asyncio.create_task(ATTACKS[name](attack))
    await asyncio.to_thread(sys.stdin.read)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return attack.counts


def main() -> None:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    name, host, port, scale = sys.argv[1:]
    print(json.dumps(asyncio.run(until_told(name, host, int(port), float(scale)))))


if __name__ == "__main__":
    main()
