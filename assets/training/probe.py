"""A quick measure of recall during training: one forward pass over whole held-out dialogues."""

from collections.abc import Sequence

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from assets.training.dialogues import RecallCase, recall_case
from assets.training.sequences import IGNORED, Encoder, case_row
from assets.training.team import Team


@torch.no_grad()
def recall(model: LlamaForCausalLM, encoder: Encoder, cases: Sequence[RecallCase], batch: int = 8) -> float:
    """Share of dialogues whose last answer has every token right, given the generator's replies before it.

    Greedy decoding gives the right answer in exactly these dialogues.
    """
    right = 0
    for first in range(0, len(cases), batch):
        rows = [case_row(encoder, case) for case in cases[first : first + batch]]
        width = max(len(row.tokens) for row in rows)
        tokens = torch.tensor([row.tokens + [0] * (width - len(row.tokens)) for row in rows])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.model(tokens, use_cache=False).last_hidden_state
        for states, row in zip(hidden, rows, strict=True):
            wanted = torch.tensor(row.labels[1:])
            chosen = torch.nonzero(wanted != IGNORED).squeeze(1)
            logits = functional.linear(states[chosen].float(), model.model.embed_tokens.weight)
            right += int(torch.equal(logits.argmax(-1), wanted[chosen]))
    return right / len(cases)


def probe(model: LlamaForCausalLM, encoder: Encoder, team: Team, cases: int = 64) -> dict[str, float]:
    """Recall at about 500 and about 1,200 tokens. The workers share the dialogues."""
    fillers = {"recall_short": (10, 12), "recall_long": (24, 40)}
    shares = torch.tensor(
        [
            recall(model, encoder, [recall_case(s, 10, turns) for s in range(team.rank, cases, team.size)])
            for turns in fillers.values()
        ]
    )
    return dict(zip(fillers, [round(share, 3) for share in team.mean(shares).tolist()], strict=True))
