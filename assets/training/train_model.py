"""Trains the embedded chat model or its draft on generated dialogues and saves it in Hugging Face layout.

Run from the repository root, after ``train_tokenizer``:
``python -m assets.training.train_model chat`` and ``python -m assets.training.train_model draft``.
An interrupted run goes on from its last checkpoint. Data depends on the seeds alone, so a run repeats exactly
on the same machine with the same number of threads.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from assets.training.initial import plant_copying_heads
from assets.training.probe import probe
from assets.training.recipes import RECIPES, Phase, Recipe
from assets.training.sequences import IGNORED, Encoder, drill_rows, training_rows
from assets.training.team import Team
from assets.training.train_tokenizer import save_tokenizer

MODELS = Path("assets/models")
SEED = 20261121
NOTE_EVERY = 25


class Trainer:
    """Owns model, optimizers and progress of one worker. All workers hold the same weights."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, work: Path, team: Team) -> None:
        torch.manual_seed(SEED)
        self.recipe = recipe
        self.team = team
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer)
        self.work = work
        self.model = LlamaForCausalLM(recipe.config(tokenizer))
        if recipe.layers > 1:
            plant_copying_heads(self.model)
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

    def batch(self, first_seed: int, rows: int, phase: Phase) -> tuple[Tensor, Tensor]:
        """Rows of dialogues and, while the phase has them, drill rows."""
        drills = int(rows * phase.drill_share)
        tokens, labels = training_rows(
            self.encoder, first_seed, rows - drills, phase.row_tokens, phase.far_share
        )
        if drills:
            words = len(self.tokenizer)
            drill = drill_rows(words, first_seed, drills, phase.row_tokens, phase.narrow_drill)
            tokens, labels = torch.cat([tokens, drill[0]]), torch.cat([labels, drill[1]])
        return tokens, labels

    def train_step(self) -> float:
        """Trains on one batch. Returns its mean loss over the tokens that the model has to write."""
        began = time.perf_counter()
        phase = self.recipe.phase_at(self.step)
        rows = phase.batch_tokens // phase.row_tokens
        mine = rows // self.team.size
        tokens, labels = self.batch(self.next_seed + self.team.rank * mine, mine, phase)
        factor = self.recipe.rate_factor(self.step)
        for optimizer, rate in zip(self.optimizers, self.base_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        loss = reply_loss(self.model, tokens, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.team.mean_gradients(self.model)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.next_seed += rows
        self.tokens_seen += phase.batch_tokens
        self.seconds += time.perf_counter() - began
        return float(self.team.mean(loss.detach()))

    def run(self, stop_after: int | None, every: int) -> None:
        last = min(self.recipe.steps, stop_after or self.recipe.steps)
        smooth: float | None = None
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        leads = self.team.rank == 0
        with Progress(*columns, speed_estimate_period=300, disable=not leads) as progress:
            bar = progress.add_task("", total=self.recipe.steps, completed=self.step)
            while self.step < last:
                loss = self.train_step()
                smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
                row = self.recipe.phase_at(self.step - 1).row_tokens
                progress.update(bar, advance=1, description=f"loss {smooth:.4f}, rows of {row}")
                if self.step % every == 0 or self.step == last:
                    self.report(smooth)
                elif leads and self.step % NOTE_EVERY == 0:
                    self.note({"loss": round(smooth, 5)})

    def report(self, loss: float) -> None:
        """Saves a checkpoint and measures held-out recall."""
        recalled = probe(self.model, self.encoder, self.team)
        if self.team.rank > 0:
            return
        self.save_checkpoint()
        self.note({"loss": round(loss, 5), **recalled})

    def note(self, figures: dict[str, float]) -> None:
        """Writes one line of JSON to the run's log."""
        entry = {"step": self.step, "tokens": self.tokens_seen, "seconds": round(self.seconds), **figures}
        self.work.mkdir(parents=True, exist_ok=True)
        with (self.work / f"{self.recipe.directory}.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")
        print(json.dumps(entry), flush=True)

    def export(self) -> None:
        """Writes the model in bf16 with its config, generation config and tokenizer files."""
        directory = MODELS / self.recipe.directory
        copy = LlamaForCausalLM(self.model.config).to(torch.bfloat16)
        copy.load_state_dict(self.model.state_dict())
        copy.config.dtype = torch.bfloat16
        copy.generation_config.do_sample = False
        copy.save_pretrained(directory)
        save_tokenizer(self.tokenizer, directory)


def reply_loss(model: LlamaForCausalLM, tokens: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy where there are labels; both tensors are [rows, tokens]. Logits are computed only there."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        wanted = labels[:, 1:]
        chosen = wanted != IGNORED
        logits = functional.linear(hidden[:, :-1][chosen], model.model.embed_tokens.weight)
    return functional.cross_entropy(logits.float(), wanted[chosen])


def work(rank: int, arguments: argparse.Namespace) -> None:
    """Runs one worker of the team, from the start or a checkpoint to the exported model."""
    torch.set_num_threads(1)
    team = Team(rank, arguments.workers)
    if team.size > 1:
        dist.init_process_group("gloo", init_method=arguments.meeting, rank=rank, world_size=team.size)
    recipe = RECIPES[arguments.recipe]
    tokenizer = AutoTokenizer.from_pretrained(MODELS / RECIPES["chat"].directory)
    trainer = Trainer(recipe, tokenizer, arguments.work, team)
    if trainer.checkpoint.exists():
        trainer.resume()
    if not arguments.export_only:
        trainer.run(arguments.stop_after, arguments.every)
    if rank == 0:
        print(json.dumps({"parameters": trainer.model.num_parameters(), "steps": trainer.step}))
        trainer.export()
    if team.size > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--work", type=Path, default=Path(".kedge/training"), help="checkpoints and log")
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--every", type=int, default=250, help="steps between checkpoint and probe")
    parser.add_argument("--stop-after", type=int, help="stop at this step and export what there is")
    parser.add_argument("--export-only", action="store_true", help="export the last checkpoint")
    arguments = parser.parse_args()
    if arguments.export_only:
        arguments.workers = 1
    with tempfile.TemporaryDirectory() as meeting:
        arguments.meeting = f"file://{meeting}/workers"
        if arguments.workers == 1:
            work(0, arguments)
        else:
            spawned = multiprocessing.get_context("spawn")
            workers = [
                spawned.Process(target=work, args=(rank, arguments)) for rank in range(arguments.workers)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            if any(worker.exitcode for worker in workers):
                sys.exit("a worker failed")


if __name__ == "__main__":
    main()
