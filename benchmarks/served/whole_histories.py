"""How much of a conversation has KV when clients send whole histories, beside clients of a session.

    python -m benchmarks.served.whole_histories --json whole_histories.json

It serves the built-in model itself, with one, two and four replicas, and with two front ends, once with
sessions.unnamed.durable. Conversations run at the same time, each with a turn at all times. The cached share of turns 2
and later is their cached tokens over the tokens of the turns before them, prompt and answer. What is missing is the
last token of each answer, which never has KV, and lost tokens: of answers that are tokenized differently from how they
were sampled, of a last page at a second turn without a name, and of turns at a replica without the KV. The server
counts these, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import save_record
from benchmarks.served.conversing_clients import Speaker, Way, open_client
from serving.cli.client.stream import TokenCounts
from serving.cli.load.prompts import PromptSource
from tests.cluster.served_cluster import ROOT, Edit, ServedCluster, eventually

VOCAB_SIZE = 4096
REPLICA_CPUS = 0.2
"""For Ray's bookkeeping only, so that four replicas fit on two cores."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`durable`: conversations without a name are kept in the session log."""

    replicas: int
    ingresses: int = 1
    durable: bool = False

    def edit(self, document: dict[str, Any]) -> None:
        args = document["applications"][0]["args"]
        args["replicas"] |= {"count": self.replicas, "num_cpus": REPLICA_CPUS}
        args["ingress"]["count"] = self.ingresses
        args.setdefault("sessions", {})["unnamed"] = {"durable": self.durable}

    @property
    def name(self) -> str:
        return f"{self.replicas} and {self.ingresses}{', durable' if self.durable else ''}"


LAYOUTS = (Layout(1), Layout(2), Layout(4), Layout(2, ingresses=2), Layout(2, ingresses=2, durable=True))


@dataclass(frozen=True, slots=True)
class Load:
    conversations: int
    turns: int
    words: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens of turns 2 and later. `said_before` counts the prompts and answers of the turns before them, of which
    `cached` had KV. `last` counts the last tokens of answers, which had none."""

    said_before: int
    cached: int
    last: int

    @classmethod
    def of(cls, conversations: Sequence[Sequence[TokenCounts]]) -> Share:
        said_before = cached = last = 0
        for usages in conversations:
            for before, usage in pairwise(usages):
                if usage.cached_tokens is None:
                    raise RuntimeError("the server does not report cached tokens")
                said_before += before.prompt_tokens + before.completion_tokens
                cached += usage.cached_tokens
                last += 1
        return cls(said_before, cached, last)

    @property
    def share(self) -> float:
        return self.cached / self.said_before

    @property
    def lost_a_turn(self) -> float:
        """Tokens a turn without KV, not counting the answer's last token."""
        return (self.said_before - self.cached - self.last) / self.last


async def converse(url: str, way: Way, load: Load, seed: int) -> list[list[TokenCounts]]:
    """Runs all conversations at the same time; returns what the server counted, by turn."""
    prompts = PromptSource(seed, VOCAB_SIZE)

    async def one(number: int) -> list[TokenCounts]:
        speaker = Speaker(client, url, way, number)
        samples = [
            await speaker.say(prompts.words(number, turn, load.words), load.max_tokens)
            for turn in range(load.turns)
        ]
        await speaker.close()
        return [sample.usage for sample in samples if sample.usage is not None]

    async with open_client() as client:
        return list(await asyncio.gather(*map(one, range(load.conversations))))


def all_ingresses_up(served: ServedCluster, layout: Layout) -> None:
    eventually(lambda: len(served.pids("ray::ServeReplica:kedge:Ingress")) == layout.ingresses, 60.0)


def measure(served: ServedCluster, layout: Layout, load: Load, seed: int) -> dict[Way, Share]:
    edit: Edit = layout.edit
    served.use(edit)
    all_ingresses_up(served, layout)
    return {
        way: Share.of(asyncio.run(converse(served.url, way, load, seed * len(Way) + number)))
        for number, way in enumerate(Way)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--words", type=int, default=64, help="of a user's message")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = Load(args.conversations, args.turns, args.words, args.max_tokens)
    table = Table("", "clients send", "said before, tokens", "cached share", "lost a turn, tokens")
    rows = []
    served = ServedCluster(ROOT / "configs" / "cluster.yaml")
    try:
        for seed, layout in enumerate(LAYOUTS):
            for way, share in measure(served, layout, load, seed).items():
                table.add_row(
                    layout.name,
                    way,
                    f"{share.said_before:,}",
                    f"{share.share:.4f}",
                    f"{share.lost_a_turn:.2f}",
                )
                rows.append({"layout": asdict(layout), "way": way, "share": share.share, **asdict(share)})
    finally:
        served.stop()
    Console(width=130).print(table)
    save_record(args.json, load=asdict(load), shares=rows)


if __name__ == "__main__":
    main()
