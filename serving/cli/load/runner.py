"""Runs the sessions of a load: warm-up first, then everything that counts."""

from __future__ import annotations

import asyncio
import gc
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import aiohttp

from serving.cli.client.server import authorization
from serving.cli.load.dialogue import Dialogue
from serving.cli.load.machine import CpuMeter
from serving.cli.load.prompts import PromptSource
from serving.cli.load.punctuality import Punctuality
from serving.cli.load.sample import LoadResult, TurnSample
from serving.cli.load.settings import LoadError, LoadSettings, Mode, PromptKind
from serving.cli.load.turn import run_turn

_WARMUP_NUMBER = 1_000_000
"""Warm-up sessions are numbered from here, so that their prompts share no prefix with measured ones."""


class LoadRun:
    """One run against one server. `on_turn` is called with every measured turn."""

    def __init__(
        self,
        settings: LoadSettings,
        *,
        on_turn: Callable[[TurnSample], None],
        api_key: str | None = None,
        server_pids: tuple[int, ...] = (),
    ) -> None:
        self._settings = settings
        self._on_turn = on_turn
        self._authorization = authorization(api_key)
        self._server_pids = server_pids
        self._prompts = PromptSource(settings.seed, settings.vocab_size)
        self._run_id = uuid.uuid4().hex[:8]
        self._words_per_turn = settings.input_tokens

    async def run(self) -> LoadResult:
        """Errors of turns are in the samples. Raises LoadError if the server cannot run this load."""
        settings = self._settings
        kept = {"keepalive_timeout": 60.0} if settings.keep_alive else {"force_close": True}
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, **kept),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=settings.timeout_s),
            headers={"accept-encoding": "identity", **self._authorization},
        ) as client:
            if settings.prompt is PromptKind.TEXT:
                await self._calibrate(client)
            await self._warm_up(client)
            async with Punctuality() as punctuality:
                with _no_garbage_collection():
                    meter = CpuMeter(self._server_pids)
                    samples = await self._measure(client)
                    cpu = meter.read()
        wall_s = max(turn.ended_s for turn in samples) - min(turn.started_s for turn in samples)
        return LoadResult(samples, wall_s, cpu, tuple(punctuality.lateness_s))

    async def _calibrate(self, client: aiohttp.ClientSession) -> None:
        """Finds how many words make `input_tokens` tokens, from the prompt lengths of two short requests."""
        few, many = 16, 80
        lengths = []
        for count in (few, many):
            probe_settings = replace(self._settings, mode=Mode.RESEND, output_tokens=1)
            probe = Dialogue(probe_settings, self._prompts, _WARMUP_NUMBER - count, "", words_per_turn=count)
            sample = await run_turn(client, probe.request(1))
            if sample.error is not None and sample.usage is None:
                raise LoadError(f"the first request failed: {sample.error}")
            lengths.append(sample.usage.prompt_tokens if sample.usage else 0)
        tokens_per_word = (lengths[1] - lengths[0]) / (many - few)
        if tokens_per_word > 0:
            self._words_per_turn = max(1, round(self._settings.input_tokens / tokens_per_word))

    async def _warm_up(self, client: aiohttp.ClientSession) -> None:
        """Runs whole sessions, as many at a time as in the measurement, so that replicas and connections are warm."""
        if self._settings.warmup == 0:
            return
        samples: list[TurnSample] = []
        await self._run_sessions(client, _WARMUP_NUMBER, self._settings.warmup, samples.append)
        failed = [sample.error for sample in samples if sample.error is not None]
        if len(failed) == self._settings.warmup:
            raise LoadError(f"every warm-up session failed: {failed[0]}")

    async def _measure(self, client: aiohttp.ClientSession) -> tuple[TurnSample, ...]:
        samples: list[TurnSample] = []

        def note(sample: TurnSample) -> None:
            samples.append(sample)
            self._on_turn(sample)

        await self._run_sessions(client, 0, self._settings.sessions, note)
        return tuple(samples)

    async def _run_sessions(
        self, client: aiohttp.ClientSession, first: int, count: int, note: Callable[[TurnSample], None]
    ) -> None:
        slots = asyncio.Semaphore(self._settings.concurrency)
        dialogues = [
            Dialogue(
                self._settings, self._prompts, number, f"bench-{self._run_id}-{number}", self._words_per_turn
            )
            for number in range(first, first + count)
        ]

        async def run_session(dialogue: Dialogue) -> None:
            async with slots:
                for turn in range(1, self._settings.turns + 1):
                    sample = await run_turn(client, dialogue.request(turn))
                    note(sample)
                    if sample.error is not None:
                        return
                    dialogue.absorb(sample)

        try:
            async with asyncio.TaskGroup() as group:
                for dialogue in dialogues:
                    group.create_task(run_session(dialogue))
        except* LoadError as errors:
            raise LoadError(str(errors.exceptions[0])) from errors
        finally:
            await self._close(client, dialogues)

    async def _close(self, client: aiohttp.ClientSession, dialogues: list[Dialogue]) -> None:
        """Frees the sessions; a server without sessions may not know the path."""
        if self._settings.mode is not Mode.SESSION:
            return
        for dialogue in dialogues:
            body = {"session_id": dialogue.session_id}
            try:
                async with client.post(f"{self._settings.url}/close_session", json=body):
                    pass
            except (aiohttp.ClientError, TimeoutError):
                return


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turns garbage collection off: a pause of the client would look like a pause of the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
