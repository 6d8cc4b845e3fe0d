"""256 streams through HTTP and Ray Serve beside the same streams in the engine alone: one card, one random model.

The engine runs in a process of its own, which has ended before the server starts. Both have the same settings, pool and
lengths; a rate is that of the stretch in which every stream decodes (decode.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.clients import ClientProcesses, Heard, Target, Turn
from benchmarks.gpu.decode import Decoded, Load, decode, steady, submit
from benchmarks.gpu.engines import PAGE_SIZE, Bench, Watch
from benchmarks.gpu.rows import skipped
from benchmarks.gpu.server import Server, write_model
from benchmarks.gpu.stage import Stage
from benchmarks.processes import cpu_seconds
from engine.settings import ExecutionSettings, SchedulerSettings

TARGET = 0.9
NEEDED = ("ray", "fastapi", "uvicorn", "msgspec", "zmq", "llguidance", "cryptography", "pydantic", "aiohttp")
ENGINE_SHARE, START_SHARE, TURN_SHARE = 0.45, 0.7, 0.6
"""Of the section's remaining time, at most: for the engine alone, for the server's start, and for a turn."""

SETTLE_S = 10.0
LOOK_S = 0.2
WARM_PROMPT, WARM_NEW = 128, 8


@dataclass(frozen=True, slots=True)
class Plan:
    """`streams` sessions of two turns, whose lengths are in tokens; `processes` of clients."""

    streams: int = 256
    prompt_tokens: int = 1024
    new_tokens: int = 256
    second_prompt: int = 64
    second_new: int = 32
    processes: int = 6
    ingresses: int = 4

    @property
    def load(self) -> Load:
        return Load(self.streams, self.prompt_tokens, self.new_tokens)

    @property
    def num_pages(self) -> int:
        """Pages for all sessions with both turns, each with a page that is not full at the end of a turn."""
        tokens = self.prompt_tokens + self.new_tokens + self.second_prompt + self.second_new + 2 * PAGE_SIZE
        return self.streams * -(-tokens // PAGE_SIZE) + 64

    @property
    def scheduler(self) -> SchedulerSettings:
        return SchedulerSettings(max_batch_tokens=8192, chunk_size=2048, max_running=self.streams)


DRY = Plan(4, 40, 400, 8, 8, processes=2, ingresses=1)


@dataclass(frozen=True, slots=True)
class Alone:
    """The engine's own figures; times to the first token in seconds."""

    decoded: Decoded
    ttft_s: list[float]
    about: str


def run(stage: Stage) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        stage.out.add(skipped(stage.section, "section", f"not installed: {', '.join(missing)}"))
        return
    shape = stage.options.model or ("tiny" if stage.dry else "8b")
    plan = DRY if stage.dry else Plan()
    clock = Clock()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_model(stage, shape, folder)
        alone = stage.attempt("engine alone", partial(engine_alone, stage, plan, shape, clock))
        stage.attempt(
            "over HTTP", partial(over_http, stage, plan, folder, config["vocab_size"], alone, clock)
        )


class Clock:
    """Tells how far a run got, in case it is cut off."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[served] {time.monotonic() - self._begin_s:6.1f} s: {text}", flush=True)


def engine_alone(stage: Stage, plan: Plan, shape: str, clock: Clock) -> Alone:
    """Runs the engine in a process that has ended on return, with its memory on the card. Raises RuntimeError with the
    child's error, or TimeoutError."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(
        target=_engine_process, args=(theirs, stage.device.type, shape, plan), daemon=True
    )
    clock.say("the engine starts in a process of its own")
    process.start()
    theirs.close()
    try:
        if not ours.poll(ENGINE_SHARE * stage.left_s):
            raise TimeoutError("the engine alone took too long")
        answer: Alone | str = ours.recv()
        process.join(SETTLE_S)
    except EOFError as error:
        process.join(SETTLE_S)
        raise RuntimeError(f"the engine's process ended with {process.exitcode}") from error
    finally:
        process.kill()
        process.join()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    decoded = answer.decoded
    stage.row(
        f"engine alone, {plan.streams} streams at {decoded.context_len:,.0f} tokens", decoded.tokens_per_s,
        "tok/s", note=f"step {decoded.step_s * 1e3:.2f} ms; TTFT {_spread(answer.ttft_s)}; {answer.about}",
        details={**asdict(decoded), "ttft_s": _quantiles(answer.ttft_s), "plan": asdict(plan)},
    )  # fmt: skip
    clock.say(f"the engine has ended; {_card_memory(stage)}")
    return answer


def _engine_process(pipe: Connection, device: str, shape: str, plan: Plan) -> None:
    try:
        pipe.send(_measure_engine(torch.device(device), shape, plan))
    except Exception as error:  # the parent's row tells it
        pipe.send(f"{type(error).__name__}: {error}")


def _measure_engine(device: torch.device, shape: str, plan: Plan) -> Alone:
    watch, load = Watch(), plan.load
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shape, device, Path(folder))
        tokens = plan.num_pages * PAGE_SIZE
        with bench.engine(watch, tokens, ExecutionSettings(), plan.scheduler) as engine:
            decode(engine, watch, replace(load, prompt_tokens=_warm(plan), new_tokens=16), seed=100)
            begin_s = time.perf_counter()
            names = submit(engine, load, seed=1)
            watch.wait(names, 60.0)
            decoded = steady(watch, names, load)
            ttft_s = [watch.times_s[name][0] - begin_s for name in names]
            about = ", ".join(f"{key} {value}" for key, value in engine.describe().items())
    return Alone(decoded, ttft_s, about)


def _warm(plan: Plan) -> int:
    return min(WARM_PROMPT, plan.prompt_tokens)


def over_http(
    stage: Stage, plan: Plan, folder: Path, vocab_size: int, alone: Alone | None, clock: Clock
) -> None:
    """Serves the model, lets all streams run their turns and looks at the books afterwards."""
    server = Server(stage, folder, settings(stage, plan, folder), START_SHARE * stage.left_s)
    clients: ClientProcesses | None = None
    try:
        clock.say(f"kedge serve starts, with {plan.ingresses} ingresses")
        clients = ClientProcesses(Target(server.url, "random", vocab_size), plan.streams, plan.processes)
        server.start()
        clients.wait_ready()
        clock.say(f"it answers; {_card_memory(stage)}")
        turns(stage, plan, server, clients, alone, clock)
        books(stage, server)
        server.sound = True
    finally:
        if clients is not None:
            clients.close()
        server.stop()
        clock.say("the server has ended")


def settings(stage: Stage, plan: Plan, folder: Path) -> dict[str, dict[str, Any]]:
    """Sections of the shipped configuration that are replaced: the model, and sizes as the engine alone has."""
    model = {"path": str(folder), "name": "random", "load_format": "dummy", "device": stage.device.type}
    cores = (0.5, 0.1) if stage.dry else (2, 1)
    sizes = ("max_batch_tokens", "chunk_size", "max_running")
    return {
        "model": {**model, "dtype": "float32" if stage.dry else "bfloat16", "seed": 1},
        "cache": {"page_size": PAGE_SIZE, "num_pages": plan.num_pages, "host_mib": 0},
        "scheduler": {name: getattr(plan.scheduler, name) for name in sizes},
        "replicas": {"count": 1, "num_cpus": cores[0], "num_gpus": 0 if stage.dry else 1},
        "ingress": {"count": plan.ingresses, "num_cpus": cores[1]},
    }  # fmt: skip


def turns(
    stage: Stage, plan: Plan, server: Server, clients: ClientProcesses, alone: Alone | None, clock: Clock
) -> None:
    everything: list[Heard] = []

    def ask(what: str, turn: Turn) -> list[Heard]:
        heard = clients.run(turn, TURN_SHARE * stage.left_s)
        errors = [each.error for each in heard if each.error is not None]
        clock.say(f"{what}: {len(heard)} streams, {len(errors)} failed{': ' + errors[0] if errors else ''}")
        everything.extend(heard)
        return [each for each in heard if each.error is None]

    ask("warm-up", Turn(1, _warm(plan), WARM_NEW, session=False))
    with cores_used(server) as cores:
        first = ask("turn 1", Turn(1, plan.prompt_tokens, plan.new_tokens))
    second = ask("turn 2", Turn(2, plan.second_prompt, plan.second_new))
    count, failed = len(everything), sum(each.error is not None for each in everything)
    stage.row(
        "failed requests", failed, "", limit=count, share=failed / count, target=0.0, goal="at_most",
        note=next((each.error for each in everything if each.error), ""),
    )  # fmt: skip
    rate_row(stage, plan, first, alone, cores)
    ttft_row(stage, f"TTFT, {plan.streams} × {plan.prompt_tokens:,} new at once", first, alone)
    cached = sum(each.cached_tokens for each in second) / max(1, sum(each.prompt_tokens for each in second))
    about = f"{cached:.1%} of the prompts' tokens had KV"
    ttft_row(stage, f"TTFT of turn 2, {plan.streams} × {plan.second_prompt} new at once", second, None, about)


def rate_row(
    stage: Stage, plan: Plan, heard: Sequence[Heard], alone: Alone | None, cores: dict[str, float]
) -> None:
    """Raises ValueError if the streams did not decode together long enough."""
    times_s = {str(each.stream): each.times_s for each in heard}
    found = steady(Watch(times_s=times_s), list(times_s), replace(plan.load, streams=len(heard)))
    engine = None if alone is None else alone.decoded.tokens_per_s
    busiest = sorted(cores.items(), key=lambda each: -each[1])[:4]
    stage.row(
        f"over HTTP, {len(heard)} streams, {plan.ingresses} ingresses", found.tokens_per_s, "tok/s",
        limit=engine, share=None if engine is None else found.tokens_per_s / engine, target=TARGET,
        note="cores: " + ", ".join(f"{role.removeprefix('ray::ServeReplica:')} {used:.2f}" for role, used in busiest),
        details={**asdict(found), "cores": cores},
    )  # fmt: skip


def ttft_row(stage: Stage, item: str, heard: Sequence[Heard], alone: Alone | None, about: str = "") -> None:
    """Times from the moment the client asked; those of the engine alone are from the first request on."""
    ttft_s = [each.times_s[0] - each.asked_s for each in heard]
    notes = [about, "" if alone is None else f"engine alone {_spread(alone.ttft_s)}"]
    for name, value_s in _quantiles(ttft_s).items():
        note = "; ".join(filter(None, notes))
        stage.row(f"{item}: {name}", value_s * 1e3, "ms", note=note, details=_quantiles(ttft_s))


def books(stage: Stage, server: Server) -> None:
    """Waits until nothing runs, then asks for the audit and the metrics."""
    end_s = time.monotonic() + SETTLE_S
    while not server.nothing_runs() and time.monotonic() < end_s:
        time.sleep(LOOK_S)
    with server.client() as client:
        audit = client.get("/v1/kedge/audit").raise_for_status().json()
        metrics = client.get("/metrics").raise_for_status().text
    leaked = server.pages()["leaked"]
    wrong = [
        text for each in audit["replicas"] for text in (*each["mismatches"], *map(str, each["findings"]))
    ]
    stage.row(
        "books after the load: leaked pages", leaked, "", share=float(leaked if audit["clean"] else max(1, leaked)),
        target=0.0, goal="at_most",
        note=f"audit {'clean' if audit['clean'] else 'NOT clean: ' + str(wrong or audit)[:200]}, "
        f"{metrics.count('# TYPE kedge')} metrics",
        details={"audit": audit},
    )  # fmt: skip


@contextlib.contextmanager
def cores_used(server: Server) -> Iterator[dict[str, float]]:
    """Fills in, at the end, the cores that each kind of process of the server used meanwhile."""
    cores: dict[str, float] = {}
    begin_s, before = time.monotonic(), cpu_seconds(server.pid)
    yield cores
    seconds = time.monotonic() - begin_s
    for role, used_s in cpu_seconds(server.pid).items():
        cores[role] = (used_s - before.get(role, 0.0)) / seconds


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {"median": float(np.median(values)), "p95": float(np.quantile(values, 0.95))}


def _spread(ttft_s: Sequence[float]) -> str:
    found = _quantiles(ttft_s)
    return f"{found['median'] * 1e3:,.0f} ms, p95 {found['p95'] * 1e3:,.0f}"


def _card_memory(stage: Stage) -> str:
    if stage.device.type != "cuda":
        return "no card"
    free, total = torch.cuda.mem_get_info()
    return f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB of the card are in use"
