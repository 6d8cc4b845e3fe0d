"""Every script of benchmarks/ fits the product: it can be imported and reads its command line. Those that need no
server run, made small, and write the figures that the pages of benchmarks/measured quote."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import measure
from benchmarks.in_process import step_cost
from benchmarks.in_process.weight_bandwidth import MODEL, VARIANTS
from benchmarks.served import engine_beside_clients
from benchmarks.served.engine_process import ProcessEngine
from engine.api import GenerateRequest, SamplingParams, TokenDelta
from engine.cpu.library import NoKernels, find_kernels
from engine.settings import CacheSettings, EngineSettings, ModelSettings
from serving.replica.engine_factory import build_local_engine
from tests.cluster.null_app import COUNTED_EVERY

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
FOLDER = "benchmarks.in_process"
EMBEDDED = "assets/models/kedge-chat"
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "benchmarks").rglob("*.py")
)
STARTED_BY_SCRIPTS = {"benchmarks.hostile.hostile_connections"}
"""Its arguments come from a script, and are not parsed."""
DEFAULT_VARIANT = "bfloat16 checkpoint, float32 (default)"
SMALL_LLAMA = MODEL | {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1} | {
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """A script of FOLDER, so it needs no server. `smaller` are values of its constants. The record's `figures` are
    read: "*" stands for every entry of a list or of an object."""

    script: str
    arguments: str
    figures: Sequence[str]
    smaller: dict[str, Any] = field(default_factory=dict)


RUNS = [
    Run(
        "adapters_decode",
        "--adapters 2 --rank 2 --streams 1 2 --rounds 1",
        ["steps.*.none.median_s", "steps.*.one.median_s", "settings.weights"],
        {"PROMPT_TOKENS": 32},
    ),
    Run(
        "controller_commits",
        "--seconds 0.05 --rounds 1 --sessions 16 --earlier-turns 1",
        ["flush_ms.*", "rows.*.turns_per_s", "rows.*.controller_cpu_us", "rows.*.p99_ms"],
        {"STREAMS": (16,), "FLUSHES": 2},
    ),
    Run(
        "controller_sessions",
        "--sessions 1000 --rounds 1",
        ["rows.*.load_s", "rows.*.bytes_a_session", "rows.*.commit_us", "rows.*.resolve_us"],
    ),
    Run(
        "engine_decode",
        "--streams 1 2 --threads 1 --prompt-tokens 8 --new-tokens 8 --rounds 1",
        ["decode.*.tokens_per_s", "decode.*.runner_step_s", "decode.*.null_step_s", "prefill.*.tokens_per_s"],
    ),
    Run(
        "kv_identity",
        "",
        ["lengths.*.turn_us", "lengths.*.from_the_log_us", "lengths.*.bytes_a_token"],
        {"LENGTHS": (100, 1_000), "TURNS": 10},
    ),
    Run(
        "overload",
        "--seconds 0.4 --pages 16",
        ["results.*.tokens_per_s", "results.*.turns", "results.*.held_times_pool"],
        {"ROUNDS": 1, "CLIENTS": 4, "SESSIONS": 4, "HOST_BYTES": 2**24},
    ),
    Run(
        "recognition_cost",
        "",
        ["bodies.*.parse_ns", "bodies.*.hash_ns", "index.known_call_us", "index.allocated_bytes_a_place"],
        {"SIZES": (5_000,), "ROUNDS": 2, "PLACES": 2_000, "LOOKUPS": 200},
    ),
    Run(
        "runner_steps",
        f"--model {EMBEDDED} --streams 1 --context 16 --threads 1 --rounds 1",
        ["load_s", "held_gb", "kv_bytes_each", "steps.*.median_s"],
        {"PROMPT_TOKENS": 32},
    ),
    Run("security_cost", "", ["ways.*.turn_us"], {"BLOCKS": 1, "TURNS": 1}),
    Run(
        "session_growth",
        "--rounds 1",
        ["bookkeeping.*.ratio", "latency.*.ratio", "checks.tokens_per_s.*", "checks.check_us"],
        {"SESSIONS": 1, "TURNS": 21, "BOOK_TURNS": 4, "SHORT": 100, "LONG": 1_000}
        | {"CHECKED_TURNS": 4, "CHECKED_STEPS": 10},
    ),
    Run(
        "speculation",
        "--sessions 1 --rounds 1",
        ["rows.*.tokens_per_s", "rows.*.times_off", "step_times_by_drafts.*"],
        {"FACTS": 1, "TIMES_ASKED": 1, "NOISE_TURNS": 1, "NOISE_TOKENS": 8, "STEP_ROUNDS": 1}
        | {"GREEDY": SamplingParams(max_new_tokens=8, temperature=0.0)},
    ),
    Run(
        "step_cost",
        "--rounds 1",
        ["streams.*.us_a_token", "streams.*.null_ms_a_step", "growth.*.ratio"],
        {"STREAMS": (2,), "GROWTH": {what: (each[0], 8, 16) for what, each in step_cost.GROWTH.items()}},
    ),
    Run(
        "weight_bandwidth",
        "--threads 1 --rows 1 2 --rounds 1",
        ["products.*.bytes_per_s", "models.*.ratio_to_floor", "models.*.step_s"],
        {"MODEL": SMALL_LLAMA, "SHAPES": ((64, 32),), "BYTES_PER_SHAPE": 1e4},
    ),
]
COMPILED = [
    Run(
        "cpu_steps",
        "--rounds 1 --round-s 0 --model '5 M' --threads 1",
        ["rows.*.torch_tokens_per_s", "rows.*.compiled_tokens_per_s", "rows.*.times_as_fast"],
        {"VARIANTS": {DEFAULT_VARIANT: VARIANTS[DEFAULT_VARIANT]}},
    ),
    Run(
        "determinism_cost",
        "--rounds 1 --round-s 0 --model '5 M' --threads 1",
        ["rows.*.free_s", "rows.*.deterministic_s", "rows.*.rate"],
        {"STEPS": ((1, 1, 100), (1, 32, 100))},
    ),
]
"""These compare kernels that a compiler made."""


def test_every_module_can_be_imported_and_every_script_reads_its_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--help"])
    scripts = []
    for name in MODULES:
        module = importlib.import_module(name)
        if name in STARTED_BY_SCRIPTS or not hasattr(module, "main"):
            continue
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert ended.value.code == 0, name
        scripts.append(name)
        assert capsys.readouterr().out.startswith("usage: "), name
    assert {f"{FOLDER}.{each.script}" for each in (*RUNS, *COMPILED)} <= set(scripts)


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts run from the repository's root, choose how many threads torch has, and measure what a copy takes."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(measure, "COPY_FLOATS", 2**16)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.script)
@pytest.mark.usefixtures("small_machine")
def test_a_small_run_writes_its_figures(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out(run, tmp_path / "record.json", monkeypatch)


@pytest.mark.parametrize("run", COMPILED, ids=lambda run: run.script)
@pytest.mark.usefixtures("small_machine")
def test_compiled_kernels_are_compared_where_they_are(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(find_kernels(), NoKernels):
        with pytest.raises(SystemExit, match="nothing to compare"):
            carry_out(run, tmp_path / "record.json", monkeypatch)
    else:
        carry_out(run, tmp_path / "record.json", monkeypatch)


def carry_out(run: Run, record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module(f"{FOLDER}.{run.script}")
    for name, value in run.smaller.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(sys, "argv", [run.script, *shlex.split(run.arguments), "--json", str(record)])
    script.main()
    written = json.loads(record.read_text())
    for path in run.figures:
        figures = [float(figure) for figure in found_at(written, path.split("."))]
        assert figures, path
        assert all(map(math.isfinite, figures)), path


def found_at(document: Any, path: Sequence[str]) -> list[Any]:
    if not path:
        return [document]
    name, *rest = path
    if name != "*":
        return found_at(document[name], rest)
    entries = document.values() if isinstance(document, dict) else document
    return [figure for entry in entries for figure in found_at(entry, rest)]


@pytest.mark.usefixtures("small_machine")
def test_an_engine_without_clients_has_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_beside_clients, "STEPS", COUNTED_EVERY)
    cost = engine_beside_clients.without_clients(streams=2, turns=2)
    assert cost.steps >= COUNTED_EVERY
    assert 0 < cost.items_a_step <= 2
    assert cost.us_a_step > 0


@pytest.mark.usefixtures("small_machine")
async def test_an_engine_in_a_process_of_its_own_answers() -> None:
    heard: list[TokenDelta] = []
    ended = asyncio.Event()

    def sink(deltas: Sequence[TokenDelta]) -> None:
        heard.extend(deltas)
        if deltas[-1].finish is not None:
            ended.set()

    settings = EngineSettings(ModelSettings(EMBEDDED, num_threads=1), CacheSettings(16, num_pages=64))
    engine = ProcessEngine(build_local_engine, settings, sink, asyncio.get_running_loop())
    try:
        engine.start()
        engine.submit(GenerateRequest("r", [5, 6, 7], SamplingParams(4, temperature=0.0, ignore_eos=True)))
        await ended.wait()
        assert sum(len(delta.token_ids) for delta in heard) == 4
        assert str(await asyncio.wrap_future(engine.audit())) == "the books balance"
    finally:
        engine.stop(30.0)
