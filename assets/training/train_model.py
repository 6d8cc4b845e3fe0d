"""Trains the embedded chat model or its draft on generated dialogues and saves it in Hugging Face layout.

Run from the repository root, after ``train_tokenizer``:
``python -m assets.training.train_model chat`` and ``python -m assets.training.train_model draft``.
An interrupted run goes on from its last checkpoint. Data depends on the seeds alone, so a run repeats exactly
on the same machine with the same number of threads.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from assets.training.dialogues import RecallCase, recall_case
from assets.training.sequences import IGNORED, Encoder, case_row, training_rows
from assets.training.train_tokenizer import save_tokenizer

MODELS = Path("assets/models")
SEED = 20261121


@dataclass(frozen=True)
class Phase:
    """So many tokens in rows of one length, ``batch_tokens`` to a step."""

    row_tokens: int
    batch_tokens: int
    total_tokens: int

    @property
    def steps(self) -> int:
        return self.total_tokens // self.batch_tokens


@dataclass(frozen=True)
class Recipe:
    """Shape, learning rates and curriculum. Short rows first: copying is found sooner on them."""

    directory: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    phases: tuple[Phase, ...]
    muon_rate: float = 0.02
    adam_rate: float = 0.003
    warmup_steps: int = 60
    decay_share: float = 0.3

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def config(self, tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=8192,
            rope_theta=10000.0,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )

    def rate_factor(self, step: int) -> float:
        """Warm up, stay, then fall in a straight line to nothing over the last ``decay_share``."""
        left = (self.steps - step) / (self.steps * self.decay_share)
        return min(1.0, (step + 1) / self.warmup_steps, max(0.0, left))

    def phase_at(self, step: int) -> Phase:
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        raise ValueError("the recipe has no such step")


RECIPES = {
    "chat": Recipe(
        "kedge-chat",
        hidden=256,
        intermediate=512,
        layers=4,
        heads=4,
        kv_heads=2,
        phases=(
            Phase(256, 4096, 5_000_000),
            Phase(512, 4096, 4_000_000),
            Phase(1024, 8192, 6_000_000),
            Phase(2048, 8192, 5_000_000),
        ),
    ),
    "draft": Recipe(
        "kedge-chat-draft",
        hidden=96,
        intermediate=128,
        layers=2,
        heads=3,
        kv_heads=1,
        phases=(Phase(256, 4096, 8_000_000), Phase(512, 4096, 4_000_000), Phase(1024, 8192, 4_000_000)),
    ),
}


class Trainer:
    """Owns model, optimizers and progress of one run."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, work: Path) -> None:
        torch.manual_seed(SEED)
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer)
        self.work = work
        self.model = LlamaForCausalLM(recipe.config(tokenizer))
        hidden = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n]
        other = [p for n, p in self.model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(hidden, lr=recipe.muon_rate, weight_decay=0.01),
            torch.optim.AdamW(other, lr=recipe.adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.base_rates = [recipe.muon_rate, recipe.adam_rate]
        self.step = 0
        self.next_seed = 0
        self.tokens_seen = 0
        self.seconds = 0.0

    @property
    def checkpoint(self) -> Path:
        return self.work / f"{self.recipe.directory}.pt"

    def save_checkpoint(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": (self.step, self.next_seed, self.tokens_seen, self.seconds),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(self.checkpoint)

    def resume(self) -> None:
        state = torch.load(self.checkpoint)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.next_seed, self.tokens_seen, self.seconds = state["progress"]

    def train_step(self) -> float:
        """One batch; returns its mean loss over the tokens the model has to write."""
        began = time.perf_counter()
        phase = self.recipe.phase_at(self.step)
        rows = phase.batch_tokens // phase.row_tokens
        tokens, labels = training_rows(self.encoder, self.next_seed, rows, phase.row_tokens)
        factor = self.recipe.rate_factor(self.step)
        for optimizer, rate in zip(self.optimizers, self.base_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        loss = reply_loss(self.model, tokens, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.next_seed += rows
        self.tokens_seen += tokens.numel()
        self.seconds += time.perf_counter() - began
        return float(loss.detach())

    def run(self, stop_after: int | None, every: int) -> None:
        last = min(self.recipe.steps, stop_after or self.recipe.steps)
        smooth: float | None = None
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(*columns, speed_estimate_period=300) as progress:
            bar = progress.add_task("", total=self.recipe.steps, completed=self.step)
            while self.step < last:
                loss = self.train_step()
                smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
                row = self.recipe.phase_at(self.step - 1).row_tokens
                progress.update(bar, advance=1, description=f"loss {smooth:.4f}, rows of {row}")
                if self.step % every == 0 or self.step == last:
                    self.report(smooth)

    def report(self, loss: float) -> None:
        """Checkpoint, held-out probe, one line of JSON in the run's log."""
        self.save_checkpoint()
        entry = {
            "step": self.step,
            "tokens": self.tokens_seen,
            "seconds": round(self.seconds),
            "loss": round(loss, 5),
            **probe(self.model, self.encoder),
        }
        with (self.work / f"{self.recipe.directory}.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")
        print(json.dumps(entry), flush=True)

    def export(self) -> None:
        """Model in bf16 with config, generation config and tokenizer files."""
        directory = MODELS / self.recipe.directory
        copy = LlamaForCausalLM(self.model.config).to(torch.bfloat16)
        copy.load_state_dict(self.model.state_dict())
        copy.config.dtype = torch.bfloat16
        copy.generation_config.do_sample = False
        copy.generation_config.max_new_tokens = 256
        copy.save_pretrained(directory)
        save_tokenizer(self.tokenizer, directory)


def reply_loss(model: LlamaForCausalLM, tokens: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy where there are labels, both [rows, tokens]; logits are computed nowhere else."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        wanted = labels[:, 1:]
        chosen = wanted != IGNORED
        logits = functional.linear(hidden[:, :-1][chosen], model.model.embed_tokens.weight)
    return functional.cross_entropy(logits.float(), wanted[chosen])


@torch.no_grad()
def recall(model: LlamaForCausalLM, encoder: Encoder, cases: Sequence[RecallCase], batch: int = 8) -> float:
    """Share of dialogues whose last answer is right in every token, the generator's replies before it.

    Greedy decoding of that answer would be right exactly where this is.
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


def probe(model: LlamaForCausalLM, encoder: Encoder, cases: int = 64) -> dict[str, float]:
    """Recall at about 500 and about 1,200 tokens."""
    fillers = {"recall_short": (10, 12), "recall_long": (24, 40)}
    return {
        name: round(recall(model, encoder, [recall_case(seed, 10, turns) for seed in range(cases)]), 3)
        for name, turns in fillers.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--work", type=Path, default=Path(".kedge/training"), help="checkpoints and log")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoint and probe")
    parser.add_argument("--stop-after", type=int, help="stop at this step and export what there is")
    parser.add_argument("--export-only", action="store_true", help="export the last checkpoint")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = RECIPES[arguments.recipe]
    tokenizer = AutoTokenizer.from_pretrained(MODELS / RECIPES["chat"].directory)
    trainer = Trainer(recipe, tokenizer, arguments.work)
    print(json.dumps({"parameters": trainer.model.num_parameters(), "steps": recipe.steps}))
    if trainer.checkpoint.exists():
        trainer.resume()
    if not arguments.export_only:
        trainer.run(arguments.stop_after, arguments.every)
    trainer.export()


if __name__ == "__main__":
    main()
