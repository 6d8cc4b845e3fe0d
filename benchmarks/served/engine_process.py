"""A trial: an engine in a process of its own, to be measured beside the product's, which is a thread.

Runs as an application of its own (`engine_process_app.py`). Requests go to the child process, and a step's deltas come
back, as MessagePack over a socket that the replica's event loop reads itself. So no thread stands between. The child
keeps a chain of each session and is sent only the tokens that it lacks. What would cost the same in both is left out:
stop strings and constraints are refused, forks are too.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from cache.token_chain import KVIdentity, TokenChain
from engine.api import (
    AdapterNotLoaded,
    DeltaSink,
    Engine,
    EngineError,
    EngineStats,
    EngineStopped,
    Finish,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    KVCensus,
    LogprobParams,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from engine.request_check import RequestLimits, check_request
from engine.settings import EngineSettings

EngineFactory = Callable[[EngineSettings, DeltaSink], Engine]

STATS_EVERY_S = 0.1
_LENGTH = struct.Struct("<I")


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A request. `tail`: the history behind the first `kept_len` tokens, which the child has."""

    request_id: str
    new_tokens: Sequence[int]
    sampling: SamplingParams
    session_id: str | None
    namespace: str
    kept_len: int
    tail: Sequence[int]
    priority: int
    logprobs: LogprobParams | None
    resumed_tokens: Sequence[int]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=1):
    request_id: str


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A call whose answer is a pickled result."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class Progress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A TokenDelta. `finish`: reason, matched, message."""

    request_id: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish: tuple[str, int | str | None, str | None] | None
    queued_s: float
    draft_tokens: int
    accepted_draft_tokens: int
    logprobs: tuple[TokenLogprob, ...]
    input_logprobs: tuple[TokenLogprob, ...]


class Step(msgspec.Struct, frozen=True, array_like=True, tag=0):
    progress: list[Progress]


class Told(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An answer, or with the number -1 what the child tells unasked: its stats and the age of its step."""

    number: int
    pickled: bytes


_ENCODER = msgspec.msgpack.Encoder(enc_hook=dict)  # of a mapping proxy
_TO_CHILD = msgspec.msgpack.Decoder(Submit | Abort | Ask)
_TO_PARENT = msgspec.msgpack.Decoder(Step | Told)


def _send(sock: socket.socket, message: Any, lock: threading.Lock) -> None:
    body = _ENCODER.encode(message)
    with lock:
        sock.sendall(_LENGTH.pack(len(body)) + body)


class _Frames:
    """The bodies of frames out of bytes as they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def take(self, data: bytes) -> list[bytes]:
        self._bytes += data
        bodies, at = [], 0
        while len(self._bytes) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._bytes, at)
            if len(self._bytes) - at - _LENGTH.size < size:
                break
            at += _LENGTH.size
            bodies.append(bytes(self._bytes[at : at + size]))
            at += size
        del self._bytes[:at]
        return bodies


class ProcessEngine:
    """Engine (see engine/api.py) whose step loop is in a child process. `loop` reads what the child sends."""

    def __init__(
        self, make: EngineFactory, settings: EngineSettings, sink: DeltaSink, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._sink = sink
        self._loop = loop
        self._lock = threading.Lock()
        self._asked: dict[int, Future[Any]] = {}
        self._kept: dict[str, tuple[int, bytes]] = {}
        self._number = 0
        self._frames = _Frames()
        self._socket, theirs = socket.socketpair()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.served.engine_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        body = pickle.dumps((make, settings))
        self._socket.sendall(_LENGTH.pack(len(body)) + body)
        self._facts: dict[str, Any] = pickle.loads(self._first())
        self._stats: EngineStats = self._facts["stats"]
        self._step_age_s = 0.0
        self._limits = RequestLimits(
            self.vocab_size,
            self.max_context_len,
            self._stats.page_size,
            self.pool_len // self._stats.page_size,
        )
        self._alive = True

    def _first(self) -> bytes:
        while True:
            data = self._socket.recv(1 << 20)
            if not data:
                raise RuntimeError("the engine's process did not start")
            bodies = self._frames.take(data)
            if bodies:
                return bodies[0]

    @property
    def alive(self) -> bool:
        return self._alive and self._child.poll() is None

    @property
    def step_age_s(self) -> float:
        return self._step_age_s

    @property
    def max_context_len(self) -> int:
        return int(self._facts["max_context_len"])

    @property
    def pool_len(self) -> int:
        return int(self._facts["pool_len"])

    @property
    def vocab_size(self) -> int:
        return int(self._facts["vocab_size"])

    def start(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.add_reader, self._socket.fileno(), self._read)

    def stop(self, timeout_s: float) -> None:
        self._alive = False
        self._child.terminate()
        self._child.wait(timeout_s)

    def abandon(self) -> None:
        self._alive = False
        self._child.kill()

    def submit(self, request: GenerateRequest) -> None:
        check_request(request, self._limits)
        if request.watcher is not None or request.constraint is not None:
            raise InvalidRequest("the trial has no stop strings and no constraints")
        kept = self._kept_len(request)
        message = Submit(
            request.request_id,
            list(request.new_tokens),
            request.sampling,
            request.session_id,
            request.namespace,
            kept,
            list(request.history[kept : request.history_len]),
            request.priority,
            request.logprobs,
            list(request.resumed_tokens),
        )
        self._post(message)

    def _kept_len(self, request: GenerateRequest) -> int:
        """How much of the history the child has. The hash of its last whole page tells whether it is the same."""
        chain, session_id = request.history_chain, request.session_id
        if chain is None or session_id is None:
            return 0
        size = chain.page_size
        kept, last = self._kept.get(session_id, (0, b""))
        whole = kept // size
        same = whole and len(chain) >= whole * size and chain.page_hash(whole - 1) == last
        kept = min(whole * size, request.history_len) if same else 0
        whole = request.history_len // size
        self._kept[session_id] = (request.history_len, chain.page_hash(whole - 1) if whole else b"")
        return kept

    def abort(self, request_id: str) -> None:
        self._post(Abort(request_id))

    def close_session(self, session_id: str) -> Future[None]:
        self._kept.pop(session_id, None)
        return self._ask("close_session", session_id)

    def rewind_session(self, session_id: str, length: int) -> Future[None]:
        return self._ask("rewind_session", session_id, length)

    def fork_session(self, *_: Any) -> Future[int]:
        raise InvalidRequest("the trial has no forks")

    @property
    def adapters(self) -> Mapping[str, str]:
        return {}

    def empty_chain(self, namespace: str, adapter: str = "") -> TokenChain:
        if adapter:
            raise AdapterNotLoaded("the trial has no adapters", param="model")
        return KVIdentity().chain(namespace, self._stats.page_size)

    def flush(self) -> Future[bool]:
        return self._ask("flush")

    def stats(self) -> EngineStats:
        return self._stats

    def describe(self) -> dict[str, str | int | float | bool]:
        described: dict[str, str | int | float | bool] = self._facts["describe"]
        return described

    def session_kv_tokens(self) -> Future[dict[str, int]]:
        return self._ask("session_kv_tokens")

    def kv_census(self) -> Future[KVCensus]:
        return self._ask("kv_census")

    def session_places(self, session_ids: Sequence[str]) -> Future[Any]:
        return self._ask("session_places", list(session_ids))

    def audit(self) -> Future[Any]:
        return self._ask("audit")

    def _ask(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._number += 1
        self._asked[self._number] = future
        self._post(Ask(self._number, method, arguments))
        return future

    def _post(self, message: Any) -> None:
        if not self._alive:
            raise EngineStopped("the engine is not running")
        _send(self._socket, message, self._lock)

    def _read(self) -> None:
        data = self._socket.recv(1 << 20)
        if not data:
            self._alive = False
            self._loop.remove_reader(self._socket.fileno())
        for body in self._frames.take(data):
            message = _TO_PARENT.decode(body)
            if isinstance(message, Step):
                self._sink([_delta(progress) for progress in message.progress])
            elif message.number < 0:
                self._stats, self._step_age_s = pickle.loads(message.pickled)
            else:
                future = self._asked.pop(message.number)
                result = pickle.loads(message.pickled)
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)


def _delta(progress: Progress) -> TokenDelta:
    finish = progress.finish
    if finish is not None:
        reason, matched, message = finish
        ended = Finish(FinishReason(reason), matched, None if message is None else EngineError(message))
    return TokenDelta(
        progress.request_id,
        progress.token_ids,
        progress.prompt_tokens,
        progress.cached_tokens,
        progress.completion_tokens,
        progress.logprobs,
        progress.input_logprobs,
        None if finish is None else ended,
        progress.draft_tokens,
        progress.accepted_draft_tokens,
        progress.queued_s,
    )


def _progress(delta: TokenDelta) -> Progress:
    finish = delta.finish
    said = None
    if finish is not None:
        message = None if finish.error is None else finish.error.message
        said = (finish.reason.value, finish.matched, message)
    return Progress(
        delta.request_id,
        delta.token_ids,
        delta.prompt_tokens,
        delta.cached_tokens,
        delta.completion_tokens,
        said,
        delta.queued_s,
        delta.draft_tokens,
        delta.accepted_draft_tokens,
        delta.logprobs,
        delta.input_logprobs,
    )


class Child:
    """The engine's process: its main thread takes messages in, the engine's thread sends each step's deltas."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = _Frames()
        self._lock = threading.Lock()
        self._chains: dict[str, TokenChain] = {}
        make, settings = pickle.loads(next(iter(self._receive())))
        self._engine: Engine = make(settings, self._deliver)
        facts = {name: getattr(self._engine, name) for name in ("max_context_len", "pool_len", "vocab_size")}
        facts |= {"stats": self._engine.stats(), "describe": self._engine.describe()}
        body = pickle.dumps(facts)
        sock.sendall(_LENGTH.pack(len(body)) + body)

    def run(self) -> None:
        self._engine.start()
        threading.Thread(target=self._tell_stats, daemon=True).start()
        while bodies := self._receive():
            for body in bodies:
                self._take(_TO_CHILD.decode(body))
        self._engine.stop(5.0)

    def _receive(self) -> list[bytes]:
        """The next messages; none once the replica is gone."""
        while data := self._socket.recv(1 << 20):
            bodies = self._frames.take(data)
            if bodies:
                return bodies
        return []

    def _deliver(self, deltas: Sequence[TokenDelta]) -> None:
        _send(self._socket, Step([_progress(delta) for delta in deltas]), self._lock)

    def _tell_stats(self) -> None:
        last, pause = None, threading.Event()
        while not pause.wait(STATS_EVERY_S):
            now = (self._engine.stats(), self._engine.step_age_s)
            if now != last:
                last = now
                _send(self._socket, Told(-1, pickle.dumps(now)), self._lock)

    def _take(self, message: Submit | Abort | Ask) -> None:
        if isinstance(message, Abort):
            self._engine.abort(message.request_id)
        elif isinstance(message, Submit):
            self._submit(message)
        else:
            if message.method == "close_session":
                self._chains.pop(message.arguments[0], None)
            future = getattr(self._engine, message.method)(*message.arguments)
            future.add_done_callback(lambda done: self._answer(message.number, done))

    def _answer(self, number: int, done: Future[Any]) -> None:
        result = done.exception() or done.result()
        _send(self._socket, Told(number, pickle.dumps(result)), self._lock)

    def _submit(self, message: Submit) -> None:
        chain: TokenChain | None = None
        history: Sequence[int] = message.tail
        if message.session_id is not None:
            chain = self._chains.get(message.session_id)
            if chain is None:
                chain = self._chains[message.session_id] = self._engine.empty_chain(message.namespace)
            chain.cut(message.kept_len)
            chain.extend(message.tail)
            history = chain.tokens
        request = GenerateRequest(
            message.request_id,
            message.new_tokens,
            message.sampling,
            history,
            len(history),
            chain,
            message.session_id,
            message.namespace,
            priority=message.priority,
            logprobs=message.logprobs,
            resumed_tokens=message.resumed_tokens,
        )
        try:
            self._engine.submit(request)
        except EngineError as error:
            ended = Finish(FinishReason.ERROR, error=error)
            self._deliver([TokenDelta(message.request_id, (), 0, 0, 0, finish=ended)])


if __name__ == "__main__":
    Child(socket.socket(fileno=int(sys.argv[1]))).run()
