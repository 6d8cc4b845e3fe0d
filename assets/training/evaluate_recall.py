"""Measures recall through the served API: facts asked for at least 10 turns and 500 tokens after they were told.

With a server running: ``python -m assets.training.evaluate_recall --base-url http://127.0.0.1:8000``.
Without one: ``--local assets/models/kedge-chat``. The model answers every turn of a held-out dialogue itself;
only new messages are sent. The table is by kind of fact; ``--json`` writes every dialogue's figures.
"""

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from assets.training.dialogues import RecallCase, recall_case
from assets.training.talkers import OpenTalk, local, served

MODEL = Path("assets/models/kedge-chat")
# Cases are chosen by the generator's replies. The model's own replies may be a little shorter.
MARGIN_TOKENS = 60


@dataclass(frozen=True)
class Result:
    """One dialogue: what was asked, what was answered, and how far back the fact was."""

    seed: int
    kind: str
    updated: bool
    expected: str
    reply: str
    right: bool
    same_sentence: bool
    turns: int
    tokens: int


@dataclass(frozen=True)
class Ruler:
    """Counts tokens between the end of the fact's message and the end of the question."""

    tokenizer: PreTrainedTokenizerBase

    def tokens(self, case: RecallCase, replies: Sequence[str]) -> int:
        return self._upto(case, replies, case.asked_turn) - self._upto(case, replies, case.stated_turn)

    def _upto(self, case: RecallCase, replies: Sequence[str], turn: int) -> int:
        messages = []
        for user, reply in zip(case.user_messages[:turn], replies[:turn], strict=True):
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
        messages.append({"role": "user", "content": case.user_messages[turn]})
        text = str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        return len(self.tokenizer.encode(text, add_special_tokens=False))


def contains_value(reply: str, value: str) -> bool:
    """Whether the reply contains the value as a whole, not as part of a longer word or number."""
    return re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", reply) is not None


def cases(ruler: Ruler, first_seed: int, min_turns: int, min_tokens: int) -> Iterator[RecallCase]:
    """Held-out dialogues that are long enough."""
    for seed in count(first_seed):
        case = recall_case(seed, min_turns)
        distance = ruler.tokens(case, case.references)
        if case.asked_turn - case.stated_turn >= min_turns and distance >= min_tokens + MARGIN_TOKENS:
            yield case


def hold(case: RecallCase, open_talk: OpenTalk, ruler: Ruler) -> Result:
    """Plays one dialogue with the model."""
    with open_talk(case.system) as talk:
        replies = [talk.say(user) for user in case.user_messages]
    return Result(
        seed=case.seed,
        kind=case.kind,
        updated=case.updated,
        expected=case.expected,
        reply=replies[-1],
        right=contains_value(replies[-1], case.expected),
        same_sentence=replies[-1] == case.references[-1],
        turns=case.asked_turn - case.stated_turn,
        tokens=ruler.tokens(case, replies),
    )


def share(results: Iterable[Result]) -> float:
    right = [result.right for result in results]
    return sum(right) / len(right) if right else 0.0


def summary(results: Sequence[Result]) -> dict[str, object]:
    """Recall overall, of updated facts, and by kind of fact."""
    kinds: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        kinds[result.kind.split()[0] if result.kind.startswith("favourite") else result.kind].append(result)
    distances = [result.tokens for result in results]
    return {
        "dialogues": len(results),
        "recall": round(share(results), 4),
        "recall_updated": round(share(r for r in results if r.updated), 4),
        "recall_beyond_1000_tokens": round(share(r for r in results if r.tokens > 1000), 4),
        "same_sentence": round(sum(r.same_sentence for r in results) / max(1, len(results)), 4),
        "distance_tokens": {
            "min": min(distances, default=0),
            "median": statistics.median(distances) if distances else 0,
            "max": max(distances, default=0),
        },
        "min_turns": min((r.turns for r in results), default=0),
        "by_kind": {
            kind: {"dialogues": len(group), "recall": round(share(group), 4)}
            for kind, group in sorted(kinds.items())
        },
    }


def show(results: Sequence[Result], figures: dict[str, object], console: Console) -> None:
    table = Table("kind of fact", "dialogues", "recall")
    by_kind = figures["by_kind"]
    assert isinstance(by_kind, dict)
    for kind, row in by_kind.items():
        table.add_row(kind, str(row["dialogues"]), f"{row['recall']:.1%}")
    table.add_section()
    for label, key in (("all", "recall"), ("updated facts", "recall_updated")):
        table.add_row(label, "", f"{figures[key]:.1%}")
    console.print(table)
    console.print({key: value for key, value in figures.items() if key != "by_kind"})
    for result in [r for r in results if not r.right][:10]:
        console.print(f"wrong: seed {result.seed}: wanted {result.expected!r}, got {result.reply!r}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--local", type=Path, metavar="DIRECTORY", help="no server: run this model here")
    parser.add_argument("--tokenizer", type=Path, default=MODEL, help="measures distances")
    parser.add_argument("--dialogues", type=int, default=200)
    parser.add_argument("--seed", type=int, default=100_000, help="first held-out seed")
    parser.add_argument("--min-turns", type=int, default=10)
    parser.add_argument("--min-tokens", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write figures and every dialogue here")
    parser.add_argument("--require", type=float, help="exit with 1 if recall is below this share")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    console = Console()
    ruler = Ruler(AutoTokenizer.from_pretrained(arguments.tokenizer))
    source = cases(ruler, arguments.seed, arguments.min_turns, arguments.min_tokens)
    chosen = [next(source) for _ in range(arguments.dialogues)]
    with httpx.Client(base_url=arguments.base_url, timeout=120) as client:
        open_talk = local(arguments.local) if arguments.local else served(client)
        with ThreadPoolExecutor(1 if arguments.local else arguments.concurrency) as pool:
            held = pool.map(lambda case: hold(case, open_talk, ruler), chosen)
            results = list(track(held, total=len(chosen), description="dialogues", console=console))
    far = [r for r in results if r.turns >= arguments.min_turns and r.tokens >= arguments.min_tokens]
    figures = summary(far) | {"left_out_as_too_near": len(results) - len(far)}
    show(far, figures, console)
    if arguments.json:
        document = {"figures": figures, "dialogues": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if arguments.require is not None and share(far) < arguments.require:
        sys.exit(1)


if __name__ == "__main__":
    main()
