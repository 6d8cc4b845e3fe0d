"""The embedded model remembers facts across the turns of 32 sessions, through HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from served_cluster import ServedCluster
from transformers import AutoTokenizer

from assets.training.evaluate_recall import Ruler, cases, hold
from assets.training.talkers import served

MODEL = Path(__file__).parents[2] / "assets" / "models" / "kedge-chat"
FIRST_SEED = 3_000_000
NUM_SESSIONS = 32
AT_ONCE = 8
MIN_TURNS = 10
MIN_TOKENS = 500


def test_facts_are_recalled_in_32_sessions(cluster: ServedCluster) -> None:
    """Runs the committed evaluation on few dialogues. Its full figures are in assets/training/README.md."""
    ruler = Ruler(AutoTokenizer.from_pretrained(MODEL))
    dialogues = list(islice(cases(ruler, FIRST_SEED, MIN_TURNS, MIN_TOKENS), NUM_SESSIONS))
    with cluster.client() as client, ThreadPoolExecutor(AT_ONCE) as pool:
        talk = served(client)
        results = list(pool.map(lambda case: hold(case, talk, ruler), dialogues))
    wrong = [f"seed {r.seed}: {r.expected!r} in {r.reply!r}" for r in results if not r.right]
    assert len(wrong) <= NUM_SESSIONS // 8, wrong
    assert all(result.turns >= MIN_TURNS for result in results)
