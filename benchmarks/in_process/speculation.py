"""What speculation gains and costs: one session at a time on the engine alone, without and with each proposer.

    python -m benchmarks.in_process.speculation --json benchmarks/results/speculation.json

There are three kinds of sessions. Recall: facts told once, then asked for three times, so the answers were said before.
Chat: the held-out dialogues of the recall test, mostly small talk. Noise: random tokens continued at a high
temperature, which nothing can predict. For each session the ways take turns; ratios are within a round over all of
them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from assets.training.dialogues import Dialogue, Message, recall_case
from assets.training.vocabulary import Draw
from benchmarks.measure import OtherProcesses, save_record, time_calls
from engine.api import GenerateRequest, SamplingParams, TokenDelta
from engine.batch import BatchItem, SampleSpec, ScheduledBatch
from engine.build import build_engine
from engine.build_runner import build_runner
from engine.models.loader import load_model
from engine.runner.torch_runner import TorchRunner
from engine.settings import (
    CacheSettings,
    EngineSettings,
    ModelSettings,
    SpeculationMethod,
    SpeculationSettings,
)
from serving.text.tokenizer_files import load_tokenizer

MODEL = Path("assets/models/kedge-chat")  # run from the repository root
DRAFT = Path("assets/models/kedge-chat-draft")
PAGE_SIZE = 16
FIRST_SEED = 400_000
WAIT_S = 300.0
GREEDY = SamplingParams(max_new_tokens=120, temperature=0.0)
FACTS, TIMES_ASKED = 6, 3
NOISE_TEMPERATURE = 2.0
STEP_ROUNDS = 8
NOISE_TURNS, NOISE_PROMPT, NOISE_TOKENS = 4, 64, 192


@dataclass(frozen=True)
class Workload:
    """Sessions, each given by the new tokens of its turns, and how to sample."""

    name: str
    sessions: list[list[list[int]]]
    sampling: SamplingParams


@dataclass
class Played:
    """What one way did with one workload. Decode time is from a turn's first token to its last."""

    decode_s: float = 0.0
    decode_tokens: int = 0
    turn_s: list[float] = field(default_factory=list)
    drafts: int = 0
    accepted: int = 0
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.decode_tokens / self.decode_s


class Turn:
    """A DeltaSink for one turn at a time."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.tokens: list[int] = []
        self.first_s = 0.0
        self.first_count = 0
        self.last: TokenDelta | None = None
        self.done = threading.Event()

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            if delta.token_ids and not self.tokens:
                self.first_s = time.perf_counter()
                self.first_count = len(delta.token_ids)
            self.tokens += delta.token_ids
            if delta.finish is not None:
                self.last = delta
                self.end_s = time.perf_counter()
                self.done.set()

    def wait(self) -> TokenDelta:
        if not self.done.wait(WAIT_S) or self.last is None:
            raise SystemExit("the engine did not finish")
        if self.last.finish is not None and self.last.finish.error is not None:
            raise self.last.finish.error
        return self.last

    def begin(self) -> float:
        self._clear()
        return time.perf_counter()


class Player:
    """One engine that runs workloads."""

    def __init__(self, name: str, settings: EngineSettings) -> None:
        self.name = name
        self._turn = Turn()
        self._engine = build_engine(settings, self._turn)
        self._engine.start()
        self._count = 0

    def play(self, prompts: Sequence[list[int]], sampling: SamplingParams, played: Played) -> None:
        """Runs one session, a turn for each prompt, and adds it to `played`."""
        history: list[int] = []
        self._count += 1
        session_id = str(self._count)
        for index, prompt in enumerate(prompts):
            request = GenerateRequest(
                f"{session_id}-{index}", prompt, sampling, history, len(history), session_id=session_id
            )
            begin_s = self._turn.begin()
            self._engine.submit(request)
            last = self._turn.wait()
            played.turn_s.append(self._turn.end_s - begin_s)
            played.decode_s += self._turn.end_s - self._turn.first_s
            played.decode_tokens += len(self._turn.tokens) - self._turn.first_count
            played.drafts += last.draft_tokens
            played.accepted += last.accepted_draft_tokens
            played.outputs.append(self._turn.tokens)
            history = history + prompt + self._turn.tokens
        self._engine.close_session(session_id).result(WAIT_S)

    def stop(self) -> None:
        self._engine.stop(10.0)


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[list[int]]:
    """The tokens of each user message, as a turn. The model writes the replies itself."""
    turns: list[list[int]] = []
    system = [{"role": "system", "content": m.content} for m in messages if m.role == "system"]
    for message in messages:
        if message.role == "user":
            part = [*(system if not turns else []), {"role": "user", "content": message.content}]
            text = str(tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=True))
            head = "\n" if turns else ""  # the template's line break after a reply
            turns.append(tokenizer.encode(head + text, add_special_tokens=False))
    return turns


def recall_messages(seed: int) -> list[Message]:
    """Facts told once, then all asked for three times, each time in another order."""
    dialogue = Dialogue(Draw(random.Random(seed), held_out=True))
    for _ in range(FACTS):
        dialogue.state_new()
    known = list(dialogue.known.values())
    for _ in range(TIMES_ASKED):
        for fact in dialogue.draw.rng.sample(known, len(known)):
            dialogue.ask(fact)
    return dialogue.messages


def chat_messages(seed: int) -> list[Message]:
    case = recall_case(seed)
    system = [] if case.system is None else [Message("system", case.system)]
    return system + [Message("user", text) for text in case.user_messages]


def workloads(tokenizer: PreTrainedTokenizerBase, sessions: int) -> Iterator[Workload]:
    seeds = range(FIRST_SEED, FIRST_SEED + sessions)
    recall = [rendered(tokenizer, recall_messages(seed)) for seed in seeds]
    yield Workload("recall", recall, GREEDY)
    yield Workload("chat", [rendered(tokenizer, chat_messages(seed)) for seed in seeds], GREEDY)
    noise = [
        [
            random.Random(f"{seed} {turn}").choices(range(16, 2048), k=NOISE_PROMPT)
            for turn in range(NOISE_TURNS)
        ]
        for seed in seeds
    ]
    sampling = SamplingParams(
        max_new_tokens=NOISE_TOKENS, temperature=NOISE_TEMPERATURE, seed=1, ignore_eos=True
    )
    yield Workload("noise", noise, sampling)


def engine_settings(args: argparse.Namespace, method: SpeculationMethod) -> EngineSettings:
    defaults = SpeculationSettings()
    given = {
        name: getattr(args, name) for name in ("max_draft_tokens", "ngram_size", "row_cost", "draft_cost")
    }
    return EngineSettings(
        ModelSettings(args.model, num_threads=args.threads),
        CacheSettings(size_bytes=args.cache_mib * 2**20),
        speculation=SpeculationSettings(
            method=method,
            draft_model=ModelSettings(args.draft_model, num_threads=args.threads),
            **{name: getattr(defaults, name) if value is None else value for name, value in given.items()},
        ),
    )


def measure(players: list[Player], workload: Workload, rounds: int) -> list[dict[str, Any]]:
    """A row for each way: medians over rounds, and ratios to the first way within each round."""
    played: dict[str, list[Played]] = {player.name: [] for player in players}
    others = OtherProcesses()
    for number in range(rounds + 1):
        results = {player.name: Played() for player in players}
        for prompts in workload.sessions:
            for player in players:
                player.play(prompts, workload.sampling, results[player.name])
        for name, result in results.items():
            if number > 0:  # the first round warms up
                played[name].append(result)
    cores = others.cores()
    base = played[players[0].name]
    rows = []
    for name, ran in played.items():
        ratios = [one.tokens_per_s / two.tokens_per_s for one, two in zip(ran, base, strict=True)]
        turns = [sum(two.turn_s) / sum(one.turn_s) for one, two in zip(ran, base, strict=True)]
        same = [one == two for one, two in zip(ran[0].outputs, base[0].outputs, strict=True)]
        rows.append(
            {
                "workload": workload.name,
                "speculation": name,
                "tokens_per_s": statistics.median(one.tokens_per_s for one in ran),
                "times_off": statistics.median(ratios),
                "times_off_by_round": ratios,
                "times_off_whole_turns": statistics.median(turns),
                "turn_ms": statistics.median(1e3 * t for one in ran for t in one.turn_s),
                "tokens": ran[0].decode_tokens,
                "draft_tokens": ran[0].drafts,
                "accepted_draft_tokens": ran[0].accepted,
                "same_turns": sum(same) / len(same),
                "other_processes_cores": cores,
            }
        )
    return rows


def step_costs(args: argparse.Namespace) -> dict[int, float]:
    """A runner's step with k drafts for one request with 200 tokens before, as a multiple of the step without."""
    settings = engine_settings(args, "off")
    runner = build_runner(load_model(settings.model), CacheSettings(page_size=PAGE_SIZE, num_pages=32))
    assert isinstance(runner, TorchRunner)
    pages = np.arange(32, dtype=np.int32)

    def step(count: int) -> Callable[[], object]:
        spec = SampleSpec(GREEDY)
        item = BatchItem("r", [5] * (1 + count), 200, pages, True, spec, num_drafts=count)
        return lambda: runner.execute(ScheduledBatch([item]))

    runner.execute(ScheduledBatch([BatchItem("r", [5] * 200, 0, pages, True, None)]))
    best_s = {count: float("inf") for count in (0, 1, 2, 3, 5, 7, 8, 12)}
    for _ in range(STEP_ROUNDS):
        for count in best_s:
            best_s[count] = min(best_s[count], time_calls(step(count), 30).median_s)
    runner.close()
    return {count: seconds / best_s[0] for count, seconds in best_s.items()}


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for name in (
        "sessions", "speculation", "tokens/s", "× off", "least", "most", "× off, whole turns", "turn ms",
        "drafts / token", "accepted", "same turns", "other cores",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        drafts, cores = row["draft_tokens"], row["other_processes_cores"]
        table.add_row(
            row["workload"],
            row["speculation"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['times_off']:.2f}",
            f"{min(row['times_off_by_round']):.2f}",
            f"{max(row['times_off_by_round']):.2f}",
            f"{row['times_off_whole_turns']:.2f}",
            f"{row['turn_ms']:.1f}",
            f"{drafts / row['tokens']:.2f}",
            f"{row['accepted_draft_tokens'] / drafts:.0%}" if drafts else "",
            f"{row['same_turns']:.0%}",
            "?" if cores is None else f"{cores:.2f}",
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--draft-model", default=str(DRAFT))
    parser.add_argument("--methods", nargs="+", default=["off", "ngram", "draft"])
    parser.add_argument("--sessions", type=int, default=6, help="of each kind")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache-mib", type=int, default=64)
    parser.add_argument("--max-draft-tokens", type=int)
    parser.add_argument("--ngram-size", type=int)
    parser.add_argument("--row-cost", type=float)
    parser.add_argument("--draft-cost", type=float)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    players = [Player(method, engine_settings(args, method)) for method in args.methods]
    tokenizer = load_tokenizer(args.model)
    if tokenizer is None:
        parser.error(f"{args.model} has no tokenizer")
    rows: list[dict[str, Any]] = []
    for workload in workloads(tokenizer, args.sessions):
        rows += measure(players, workload, args.rounds)
    for player in players:
        player.stop()
    print_table(rows, f"Speculation: {Path(args.model).name}, one session at a time")
    costs = step_costs(args)
    shown = ", ".join(f"{count}: {times:.2f}" for count, times in costs.items())
    Console(width=140).print(f"a step with drafts, as a multiple of one without: {shown}")
    settings = {key: str(value) for key, value in vars(args).items() if key != "json"}
    save_record(args.json, settings=settings, rows=rows, step_times_by_drafts=costs)


if __name__ == "__main__":
    main()
