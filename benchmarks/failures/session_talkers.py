"""Clients that talk in sessions to a server that may fail at any moment, and check every turn that is answered.

Each client has one session and a turn in flight at all times, streamed or not. It repeats a turn that failed with the
same idempotency key. Some clients leave in mid-stream and come back. For every turn they check

- that it is the session's next turn (`x-session-turn`), and that the server counts its tokens correctly;
- that the final answer begins with what a broken stream had sent;
- that the log has the turn once, with the answer that was sent: asked again under its key it must be a replay;
- when the session ends, that its answer is the model's: one request with the whole history gives for each position the
  token that the model puts first. A turn that differs there, as two tokens that are about as likely can cause, is asked
  again as a request of its own, with the history before it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

TOKENS = range(300, 900)
LONGEST_HISTORY = 1500
GIVE_UP_S = 120.0
PAUSE_S = 0.1
SILENCE_S = 1.0
"""A stream that sends nothing for longer counts as interrupted; on two busy cores a step may well take 0.1 s."""
STREAM_SHARE = 0.7
LEAVING_SHARE = 0.03


@dataclass
class Findings:
    """Counts what happened: `failures` are attempts that a client had to repeat, by code; `wrong` must stay empty.

    Of the `turns` that were answered, `logged` were found in the log and `checked` have been compared with the model's
    answer; for that `asked_afresh` of them needed a request of their own.
    """

    turns: int = 0
    tokens: int = 0
    repeated_turns: int = 0
    replayed_turns: int = 0
    left: int = 0
    logged: int = 0
    checked: int = 0
    asked_afresh: int = 0
    blows: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    silences_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def all_checked(self) -> bool:
        return self.turns == self.logged == self.checked


class Failed(Exception):
    """An attempt that may be repeated."""


class Left(Exception):
    """The client left in mid-stream on purpose."""


@dataclass
class Answer:
    """What one attempt at a turn has sent so far. `turn` is the number of turns that the session had before. It is None
    for a stream whose first token came late, which does not say."""

    tokens: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    turn: int | None = None
    replayed: bool = False


class Talker:
    """A client with one session at a time. `stream_share` of its attempts stream; it leaves in `leaving_share` of its
    turns if they stream."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        findings: Findings,
        seed: str,
        *,
        stream_share: float = STREAM_SHARE,
        leaving_share: float = LEAVING_SHARE,
    ) -> None:
        self._client = client
        self._findings = findings
        self._rng = random.Random(seed)
        self._stream_share = stream_share
        self._leaving_share = leaving_share
        self._session_id = ""
        self._history: list[int] = []
        self._answers: list[range] = []
        """The range of each turn's answer in the history."""
        self._num_checked = 0

    async def next_turn(self) -> None:
        """Runs one turn, in a new session if there is none or the session is long."""
        if not self._session_id or len(self._history) > LONGEST_HISTORY:
            await self._begin()
        await self._turn()

    async def check_end(self, sessions: dict[str, dict[str, Any]]) -> None:
        """Checks that the server counts the client's turns and tokens. `sessions` is the server's list, by id."""
        listed = sessions.get(self._session_id, {})
        for what, have in (("tokens", len(self._history)), ("turns", len(self._answers))):
            if self._session_id and listed.get(what) != have:
                self._wrong(f"{have} {what}, the server has {listed.get(what)}")

    async def _begin(self) -> None:
        if self._session_id:
            await self.check_answers()
            await self._insist("/close_session", {"session_id": self._session_id})
        name = f"talk-{uuid.uuid4().hex[:12]}"
        self._history, self._answers, self._num_checked = [], [], 0
        await self._insist(
            "/open_session",
            {"capacity_of_str_len": 100_000, "streaming": True, "session_id": name},
            taken=True,
        )
        self._session_id = name

    async def _turn(self) -> None:
        rng, findings = self._rng, self._findings
        new = rng.choices(TOKENS, k=rng.randint(1, 40))
        sampling = {"max_new_tokens": rng.choice((4, 16, 64, 200)), "temperature": 0, "ignore_eos": True}
        body = {"input_ids": new, "sampling_params": sampling, "session_params": {"id": self._session_id}}
        headers = {"idempotency-key": uuid.uuid4().hex}
        leaves_after = rng.randint(1, 20) if rng.random() < self._leaving_share else None
        deadline_s, tries, told = time.monotonic() + GIVE_UP_S, 0, list[int]()
        while True:
            tries += 1
            answer = Answer()
            try:
                await self._attempt(body, headers, rng.random() < self._stream_share, leaves_after, answer)
                break
            except Left:
                findings.left += 1
            except (Failed, httpx.HTTPError) as error:
                self._failed(error)
            leaves_after = None
            told = max(told, answer.tokens, key=len)
            if time.monotonic() > deadline_s:
                self._wrong(f"a turn was not answered in {GIVE_UP_S:.0f} s")
                self._session_id = ""
                return
            await asyncio.sleep(PAUSE_S)
        findings.replayed_turns += answer.replayed
        findings.repeated_turns += tries > 1
        self._note(new, answer, told)
        await self._check_log(body, headers, answer)

    def _note(self, new: list[int], answer: Answer, told: list[int]) -> None:
        output, meta = answer.tokens, answer.meta
        self._findings.turns += 1
        self._findings.tokens += len(output)
        if answer.turn not in (None, len(self._answers)):
            self._wrong(f"turn {answer.turn}, where the client has had {len(self._answers)}")
        if meta["prompt_tokens"] != len(self._history) + len(new):
            self._wrong(f"{meta['prompt_tokens']} prompt tokens, not {len(new)} more")
        if meta["completion_tokens"] != len(output):
            self._wrong(f"{meta['completion_tokens']} tokens counted, {len(output)} sent")
        if output[: len(told)] != told:
            self._wrong(f"an earlier try said {told}, the answer is {output}")
        self._history += new + output
        self._answers.append(range(len(self._history) - len(output), len(self._history)))

    async def _check_log(self, body: dict[str, Any], headers: dict[str, str], answer: Answer) -> None:
        """Checks that the turn, asked again under its key, is a replay of what was sent."""
        deadline_s = time.monotonic() + GIVE_UP_S
        while True:
            again = Answer()
            try:
                await self._attempt(body, headers, False, None, again)
                break
            except (Failed, httpx.HTTPError) as error:
                self._failed(error)
            if time.monotonic() > deadline_s:
                self._wrong(f"a replay was not answered in {GIVE_UP_S:.0f} s")
                return
            await asyncio.sleep(PAUSE_S)
        self._findings.logged += 1
        if not again.replayed:
            self._wrong("a turn was run again under its key")
        turn = len(self._answers) - 1
        if (again.turn, again.tokens) != (turn, answer.tokens):
            self._wrong(f"sent turn {turn} {answer.tokens}, logged turn {again.turn} {again.tokens}")

    async def check_answers(self) -> None:
        """Checks every unchecked answer of the session against what the model says after the history before it."""
        if self._num_checked == len(self._answers):
            return
        body = {
            "input_ids": self._history,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 1,
        }
        first = (await self._insist("/generate", body)).json()["meta_info"]["input_top_logprobs"]
        for place in self._answers[self._num_checked :]:
            if any(first[position][0][1] != self._history[position] for position in place):
                await self._ask_afresh(place)
            self._findings.checked += 1
            self._num_checked += 1

    async def _ask_afresh(self, place: range) -> None:
        self._findings.asked_afresh += 1
        sampling = {"max_new_tokens": len(place), "temperature": 0, "ignore_eos": True}
        body = {"input_ids": self._history[: place.start], "sampling_params": sampling}
        fresh = (await self._insist("/generate", body)).json()["output_ids"]
        answer = self._history[place.start : place.stop]
        if fresh != answer:
            self._wrong(f"{answer} at {place.start}, afresh {fresh}")

    async def _attempt(
        self,
        body: dict[str, Any],
        headers: dict[str, str],
        stream: bool,
        leaves_after: int | None,
        answer: Answer,
    ) -> None:
        """One try, which fills `answer`. Raises Failed or Left."""
        request = self._client.build_request(
            "POST", "/generate", json=body | {"stream": stream}, headers=headers
        )
        reply = await self._client.send(request, stream=True)
        try:
            if reply.status_code != 200:
                await reply.aread()
                raise Failed(_code(reply))
            turn = reply.headers.get("x-session-turn")
            answer.turn = None if turn is None else int(turn)
            answer.replayed = reply.headers.get("idempotent-replayed") == "true"
            if stream:
                await self._listen(reply, leaves_after, answer)
                return
            whole = json.loads(await reply.aread())
            answer.tokens, answer.meta = whole["output_ids"], whole["meta_info"]
        finally:
            await reply.aclose()

    async def _listen(self, reply: httpx.Response, leaves_after: int | None, answer: Answer) -> None:
        last_s, longest_s, count = time.monotonic(), 0.0, 0
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now_s, count = time.monotonic(), count + 1
            last_s, longest_s = now_s, max(longest_s, now_s - last_s if count > 1 else 0.0)
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Failed(str(event["error"]["code"]))
            answer.tokens, answer.meta = event["output_ids"], event["meta_info"]
            self._heard(answer)
            if count == leaves_after:
                raise Left
        if answer.meta.get("finish_reason") is None:
            raise Failed("the stream broke off")
        if longest_s > SILENCE_S:
            self._findings.silences_s.append(longest_s)

    def _heard(self, answer: Answer) -> None:
        """Called for each event of a stream; `answer` is what the stream has sent so far."""

    async def _insist(self, path: str, body: dict[str, Any], *, taken: bool = False) -> httpx.Response:
        """Repeats the call until it is answered. With `taken`, a 400 counts as an answer after the first try, since an
        earlier try may have opened the session."""
        deadline_s, first = time.monotonic() + GIVE_UP_S, True
        while True:
            try:
                reply = await self._client.post(path, json=body)
                if reply.status_code == 200 or (taken and not first and reply.status_code == 400):
                    return reply
                self._failed(Failed(_code(reply)))
            except httpx.HTTPError as error:
                self._failed(error)
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{path} was not answered in {GIVE_UP_S:.0f} s")
            first = False
            await asyncio.sleep(PAUSE_S)

    def _failed(self, error: Failed | httpx.HTTPError) -> None:
        self._findings.failures[str(error) if isinstance(error, Failed) else type(error).__name__] += 1

    def _wrong(self, what: str) -> None:
        self._findings.wrong.append(f"{self._session_id} at {len(self._history)}: {what}")


def _code(reply: httpx.Response) -> str:
    try:
        return f"{reply.status_code} {reply.json()['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return f"{reply.status_code}"
