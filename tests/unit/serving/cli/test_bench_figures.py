"""Percentiles, buckets, bursts and stream parsing, on hand-made samples."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest

from serving.cli.client.stream import Chunk, EventSplitter, TokenCounts, parse_event
from serving.cli.load.machine import CpuMeter, CpuShares, describe_machine
from serving.cli.load.prompts import PromptSource
from serving.cli.load.punctuality import Punctuality
from serving.cli.load.sample import LoadResult, TurnSample
from serving.cli.load.server_processes import find_server_pids
from serving.cli.load.settings import Endpoint, LoadSettings, Mode, PromptKind
from serving.cli.load.summary import spread, summarize, turn_buckets
from tests.unit.serving.openai_stub import Stub, running


def settings(sessions: int = 1, turns: int = 1, output_tokens: int = 4) -> LoadSettings:
    return LoadSettings(
        url="http://x",
        model="m",
        mode=Mode.SESSION,
        endpoint=Endpoint.COMPLETIONS,
        prompt=PromptKind.IDS,
        sessions=sessions,
        turns=turns,
        input_tokens=8,
        output_tokens=output_tokens,
        concurrency=1,
        warmup=0,
        seed=0,
        vocab_size=100,
        ignore_eos=True,
        timeout_s=1.0,
    )


def sample(
    times_s: list[float], usage: TokenCounts | None = None, turn: int = 1, session: int = 0
) -> TurnSample:
    return TurnSample(session, turn, 10.0, times_s[-1], tuple(times_s), usage)


@pytest.mark.parametrize("count", [2, 3, 10, 999])
def test_percentiles_agree_with_numpy(count):
    values = [random.Random(count).random() for _ in range(count)]
    got = spread(values)
    expected = np.percentile(values, [50, 90, 99])
    assert [got.p50, got.p90, got.p99] == pytest.approx(list(expected))
    assert got.mean == pytest.approx(np.mean(values))
    assert got.count == count


def test_percentiles_of_one_value_and_of_none():
    assert spread([3.0]).p99 == 3.0
    assert spread([]) is None


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (1, {"all turns": [1], "turn 1": [1]}),
        (3, {"all turns": [1, 2, 3], "turn 1": [1], "turns 2-3": [2, 3]}),
        (7, {"turns 2-5": [2, 3, 4, 5], "turns 6-7": [6, 7]}),
        (20, {"turns 2-5": [2, 3, 4, 5], "turns 16-20": [16, 17, 18, 19, 20]}),
    ],
)
def test_buckets_do_not_overlap(turns, expected):
    got = {name: list(numbers) for name, numbers in turn_buckets(turns).items()}
    assert expected.items() <= got.items()


def test_figures_of_one_turn():
    turn = sample([10.010, 10.012, 10.014, 10.020], TokenCounts(100, 4, 92))
    summary = summarize(settings(), LoadResult((turn,), wall_s=0.5, cpu=None))
    assert summary.ttft["all turns"].p50 == pytest.approx(0.010)
    assert summary.chunk_gap.p50 == pytest.approx(0.002)
    assert summary.time_per_token.p50 == pytest.approx(0.010 / 3)
    assert summary.output_tokens_per_s == pytest.approx(8)
    assert summary.total_tokens_per_s == pytest.approx(208)
    assert summary.cached_share == pytest.approx(0.92)
    assert summary.rejected == ()
    assert summary.notes == ()


def test_bursts_are_gaps_under_50_microseconds():
    turn = sample([10.0, 10.00004, 10.001, 10.00106], TokenCounts(1, 4, 0))
    summary = summarize(settings(), LoadResult((turn,), wall_s=1.0, cpu=None))
    assert summary.bursts == 1
    assert summary.burst_share == pytest.approx(1 / 3)
    assert "1 bursts" in summary.rejected[0]


@pytest.mark.parametrize(("late_s", "rejected"), [(0.001, False), (0.02, True)])
def test_bursts_are_held_against_a_run_only_if_the_client_was_late(late_s, rejected):
    turn = sample([10.0, 10.00004, 10.001, 10.00106], TokenCounts(1, 4, 0))
    result = LoadResult((turn,), wall_s=1.0, cpu=None, lateness_s=(late_s,) * 100)
    summary = summarize(settings(), result)
    assert bool(summary.rejected) is rejected
    assert any("in lumps" in note for note in summary.notes) is not rejected


async def test_a_blocked_client_is_found_late():
    async with Punctuality() as punctuality:
        await asyncio.sleep(0.02)
        time.sleep(0.1)
        await asyncio.sleep(0.02)
    assert max(punctuality.lateness_s) > 0.05


def test_other_processes_reject_a_run():
    turn = sample([10.0, 10.1, 10.2, 10.3], TokenCounts(1, 4, 0))
    cpu = CpuShares(all_cores=1.9, client_cores=0.1, server_cores=1.5, other_cores=0.3)
    summary = summarize(settings(), LoadResult((turn,), wall_s=1.0, cpu=cpu))
    assert summary.rejected == ("other processes used 0.30 cores",)


def test_turns_that_stopped_early_are_noted():
    turn = sample([10.0, 10.1], TokenCounts(1, 2, 0))
    summary = summarize(settings(), LoadResult((turn,), wall_s=1.0, cpu=None))
    assert summary.notes == ("1 of 1 turns ended before 4 output tokens",)


def test_events_are_put_together_from_any_split():
    stream = b': ping\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata: {"b": "\xc3\xa9"}\n\ndata: [DONE]\n\n'
    for cut in range(len(stream)):
        splitter = EventSplitter()
        events = splitter.push(stream[:cut]) + splitter.push(stream[cut:])
        assert events == ['{"a": 1}', '{"b": "é"}', "[DONE]"]


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ('{"choices":[{"delta":{"role":"assistant","content":""}}]}', Chunk()),
        ('{"choices":[{"delta":{"content":"a"}}]}', Chunk(text="a", carries_token=True)),
        ('{"choices":[{"delta":{"role":"assistant","content":"a"}}]}', Chunk(text="a", carries_token=True)),
        ('{"choices":[{"delta":{"content":""},"finish_reason":null}]}', Chunk(carries_token=True)),
        ('{"choices":[{"delta":{},"finish_reason":"stop"}]}', Chunk(finish_reason="stop")),
        ('{"choices":[{"delta":{"content":""},"finish_reason":"stop"}]}', Chunk(finish_reason="stop")),
        ('{"choices":[{"delta":{"reasoning_content":"r"}}]}', Chunk(thought="r", carries_token=True)),
        ('{"choices":[{"delta":{"reasoning":"r"}}]}', Chunk(thought="r", carries_token=True)),
        (
            '{"choices":[{"text":"a","token_ids":[5],"finish_reason":"length"}]}',
            Chunk(text="a", token_ids=(5,), carries_token=True, finish_reason="length"),
        ),
        (
            '{"choices":[{"delta":{"role":"assistant","content":""},"token_ids":[7]}]}',
            Chunk(token_ids=(7,), carries_token=True),
        ),
        (
            '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}',
            Chunk(usage=TokenCounts(3, 2, None)),
        ),
        (
            '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,'
            '"prompt_tokens_details":{"cached_tokens":1}}}',
            Chunk(usage=TokenCounts(3, 2, 1)),
        ),
        ('{"error":{"message":"no","code":400}}', Chunk(error="no")),
        ("[DONE]", None),
    ],
)
def test_chunks_of_several_servers(payload, expected):
    assert parse_event(payload) == expected


@pytest.mark.parametrize("payload", ["", "nonsense", "[1]"])
def test_payloads_that_are_no_objects(payload):
    with pytest.raises(ValueError):  # noqa: PT011
        parse_event(payload)


def test_prompts_depend_on_seed_session_and_turn_only():
    first = PromptSource(1, 100)
    assert first.token_ids(2, 3, 50) == PromptSource(1, 100).token_ids(2, 3, 50)
    assert first.words(2, 3, 50) == PromptSource(1, 100).words(2, 3, 50)
    assert first.token_ids(2, 3, 50) != first.token_ids(2, 4, 50)
    assert first.token_ids(2, 3, 50) != first.token_ids(3, 3, 50)


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs Linux")
def test_cpu_of_the_server_is_told_from_that_of_others():
    """A child of the 'server' burns CPU. This must count as the server's, however busy the machine is."""
    burn = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    server = subprocess.Popen([sys.executable, "-c", burn], start_new_session=True)
    try:
        meter = CpuMeter((server.pid,))
        deadline_s = time.monotonic() + 60
        while (shares := meter.read()).server_cores < 0.05 and time.monotonic() < deadline_s:
            time.sleep(0.2)
    finally:
        os.killpg(server.pid, 9)
        server.wait()
    assert shares.server_cores >= 0.05
    # The two figures are read one after the other. On a busy machine the server may seem to have used more than all.
    assert shares.other_cores <= max(shares.all_cores - shares.server_cores, 0.0)
    assert CpuMeter().read().other_cores is None


def test_only_a_kedge_server_on_this_machine_has_known_processes():
    assert find_server_pids("http://192.0.2.1:8000") == ()
    with running(Stub()) as stub:
        assert find_server_pids(stub.url) == ()


def test_machine_names_the_scheduling_of_the_client():
    assert describe_machine()["client_scheduling"] in ("normal", "real-time 50")
