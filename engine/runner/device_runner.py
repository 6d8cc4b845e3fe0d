"""The Runner of a GPU: steps read from fixed buffers, are replayed as CUDA graphs, and are launched without waiting for
picks.

A step is two functions of fixed memory: the body, from tokens to the hidden states of the sampled rows, and the head,
from those to picks. Each is captured for a ladder of sizes and runs eagerly beyond it. Steps that need the host between
the two (scores of input tokens, drafts under penalties) are left to the TorchRunner, which waits.

Legend: N rows of the step, B items, R sampled rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cache.tiers import PoolPages
from engine.attention.interface import AttentionStep, ItemLens, TableAttention
from engine.batch import BatchItem, ItemOutput, ModelOutput, ScheduledBatch
from engine.device import Fence, pinned
from engine.models.protocol import CausalModel
from engine.parallel.ranks import RankGroup
from engine.runner.graphs import Graphs
from engine.runner.penalties import PenaltyTable
from engine.runner.protocol import Done, Launch, RunnerLost
from engine.runner.sample_table import RowPicker
from engine.runner.sampler import Scores, add_bias, allowed_rows
from engine.runner.step_buffers import StepBuffers, StepShape, StepTensors
from engine.runner.torch_runner import TorchRunner
from engine.runner.verify import agreed, masks_of

STEP_TIMEOUT_S = 120.0


class DeviceLaunch:
    """A Launch whose picks are being copied to host memory, [num_steps, R], with their scores if asked for."""

    def __init__(self, batch: ScheduledBatch, picks_SR: Tensor, fence: Fence, scores: Scores | None) -> None:
        self._batch = batch
        self._picks_SR = picks_SR
        self._fence = fence
        self._scores = scores

    def result(self) -> ModelOutput:
        try:
            self._fence.wait(STEP_TIMEOUT_S)
        except Exception as error:
            raise RunnerLost(f"{type(error).__name__}: {error}") from error
        picks_SR: list[list[int]] = self._picks_SR.tolist()
        outputs: list[ItemOutput] = []
        scored: list[tuple[int, ItemOutput]] = []
        tops: list[int] = []
        for item in self._batch.items:
            spec, row = item.sample, len(tops)
            if spec is None:
                outputs.append(ItemOutput(()))
                continue
            tokens = agreed(item, picks_SR[0], row) + tuple(later_R[row] for later_R in picks_SR[1:])
            outputs.append(ItemOutput(tokens, num_proposed=item.num_drafts))
            tops += [spec.top_logprobs] * (1 + item.num_drafts)
            if spec.logprobs:
                scored.append((row, outputs[-1]))
        if self._scores is not None:
            entries = self._scores.read(picks_SR[0], tops)
            for row, output in scored:
                output.logprobs = tuple(entries[row : row + len(output.token_ids)])
        return ModelOutput(outputs)


class DeviceRunner:
    """A Runner around a TorchRunner, whose model, pools and copies it uses. Composed by engine/build_runner.py.

    `sizes` is the ladder, ascending: a step is padded to the next size. Steps beyond its end, or without a ladder, keep
    their own size.
    """

    def __init__(
        self,
        careful: TorchRunner,
        model: CausalModel,
        attention: TableAttention,
        buffers: StepBuffers,
        picker: RowPicker,
        graphs: Graphs,
        sizes: tuple[int, ...],
        max_sampled: int,
        max_steps: int,
        ranks: RankGroup,
        *,
        runs_ahead: bool,
    ) -> None:
        self._careful = careful
        self._model = model
        self._attention = attention
        self._buffers = buffers
        self._picker = picker
        self._graphs = graphs
        self._sizes = sizes
        self._max_sampled = max_sampled
        self._max_steps = max_steps
        self._ranks = ranks
        self.facts = replace(careful.facts, runs_ahead=runs_ahead)
        self._plans: dict[StepShape, tuple[StepTensors, AttentionStep]] = {}
        self._device = buffers.picks_R.device
        self._penalties = PenaltyTable()
        self._sampled_RE: Tensor | None = None
        self._last_rows: list[int] = []
        self._picks = [pinned(max_steps * max_sampled, torch.int64, self._device) for _ in range(2)]
        self._count = 0

    def describe(self) -> dict[str, str | int | float | bool]:
        graphs = ",".join(map(str, self._sizes)) if self._graphs.replays else "off"
        about = self._careful.describe()
        return {**about, "runner": "device", "graphs": graphs, "runs_ahead": self.facts.runs_ahead}

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures every size of the ladder, the largest first so that the others fit into its memory. Steps that
        cannot be captured are run once. Nothing is written to the pools."""
        most_sampled = self._padded(self._max_sampled)
        for size in reversed(self._sizes):
            for decode in (True, False):
                shape = StepShape(size, size, decode)
                parts = self._parts(shape)
                self._plans[shape][0].blank()
                if self._attention.captures(1 if decode else size):
                    for name, function in parts.items():
                        self._graphs.capture((name, shape), function)
                else:
                    parts["body"]()
            if size <= most_sampled:
                self._graphs.capture(("head", size), partial(self._head, size))

    @torch.inference_mode()
    def rehearse(self, rows: int, items: int, longest: int | None = None) -> None:
        """Runs a step of padding, as if an item had `longest` rows (by default all), with the most sampled rows that a
        step can have. Shows how much memory that takes, and compiles its kernels. Nothing is written to the pools."""
        shape = StepShape(rows, items, decode=False)
        self._buffers.tensors(shape).blank()
        self._parts(shape, _lens_like(shape, longest or rows), min(rows, self._max_sampled))["body"]()
        self._head(self._max_sampled)

    @torch.inference_mode()
    def rehearse_picks(self) -> None:
        """Picks from logits in the model's own dtype, and in float32, as steps do whose logits are edited or scored.
        The kernels also differ by the alignment of what lies behind a number of rows; up to four have every one. To be
        called after `rehearse`."""
        for num_sampled in sorted({*range(1, min(4, self._max_sampled) + 1), self._max_sampled}):
            logits_RV = self._logits(num_sampled)
            for each_RV in (logits_RV, logits_RV.float()):
                self._choose(each_RV, num_sampled)

    def launch(self, batch: ScheduledBatch) -> Launch:
        try:
            return self._start(batch)
        except Exception as error:
            try:  # the step must be over before its buffers and pages are reused
                Fence(self._device).wait(STEP_TIMEOUT_S)
            except Exception:
                raise RunnerLost(f"{type(error).__name__}: {error}") from error
            raise

    @torch.inference_mode()
    def _start(self, batch: ScheduledBatch) -> Launch:
        batch = self._careful.with_drafts(batch)
        if any(map(_needs_host, batch.items)):
            return self._launch_carefully(batch)
        num_sampled = sum(1 + item.num_drafts for item in batch.items if item.sample is not None)
        shape, padded = self._shape(batch), self._padded(num_sampled)
        self._buffers.fill(batch, shape, padded, self._last_rows)
        lens = [ItemLens(len(item.token_ids), item.start + len(item.token_ids)) for item in batch.items]
        parts = self._parts(shape, lens, padded)
        for name in ("unpack", "body"):
            self._graphs.run((name, shape), parts[name])
        scores = self._pick(batch, padded, num_sampled) if num_sampled else None
        self._count += 1
        host_SR = self._picks[self._count % 2][: batch.num_steps * num_sampled]
        host_SR = host_SR.view(batch.num_steps, num_sampled)
        picks_R = self._buffers.picks_R[:num_sampled]
        host_SR[0].copy_(picks_R, non_blocking=True)
        for step in range(1, batch.num_steps):
            for name in ("advance", "body"):
                self._graphs.run((name, shape), parts[name])
            self._buffers.next_points(padded, step)
            self._graphs.run(("head", padded), partial(self._head, padded))
            host_SR[step].copy_(picks_R, non_blocking=True)
        self._last_rows = _last_rows(batch.items)
        return DeviceLaunch(batch, host_SR, Fence(self._device), scores)

    def save(self, key: int, pages: PoolPages) -> Future[None]:
        return self._careful.save(key, pages)

    def spill(self, source: int, key: int) -> Future[None]:
        return self._careful.spill(source, key)

    def load(self, key: int, pages: PoolPages) -> Future[None]:
        return self._careful.load(key, pages)

    def drop(self, key: int) -> None:
        self._careful.drop(key)

    def clone(self, source: PoolPages, target: PoolPages) -> None:
        self._careful.clone(source, target)

    def close(self) -> None:
        """Waits for running copies, and drops the graphs. Nothing may be called afterwards."""
        self._careful.close()
        self._graphs.close()

    def _shape(self, batch: ScheduledBatch) -> StepShape:
        items = len(batch.items)
        rows = sum(len(item.token_ids) for item in batch.items)
        padded = self._padded(rows)
        on_ladder = bool(self._sizes) and rows <= self._sizes[-1]
        return StepShape(padded, padded if on_ladder else items, rows == items)

    def _padded(self, rows: int) -> int:
        index = bisect_left(self._sizes, rows)
        return self._sizes[index] if rows and index < len(self._sizes) else rows

    def _parts(
        self, shape: StepShape, lens: Sequence[ItemLens] | None = None, num_sampled: int | None = None
    ) -> dict[str, Callable[[], None]]:
        """What a step of this shape does before its head: unpack, then body. A decode that follows another without the
        host does advance in place of unpack. On the ladder only the shape matters."""
        plan = self._plans.get(shape)
        if plan is None:
            captured = shape.rows in self._sizes
            tensors = self._buffers.tensors(shape, None if captured else lens)
            plan = tensors, self._attention.plan(tensors.tables)
            if captured:
                self._plans[shape] = plan
        tensors, attend = plan
        rows = shape.rows if shape.rows in self._sizes or num_sampled is None else num_sampled
        picks_R = self._buffers.picks_R
        parts: dict[str, Callable[[], None]] = {
            "unpack": partial(tensors.unpack, picks_R),
            "body": partial(self._body, tensors, attend, rows),
        }
        if shape.decode and self._max_steps > 1:
            parts["advance"] = partial(tensors.advance, picks_R, self.facts.page_size)
        return parts

    def _body(self, step: StepTensors, attend: AttentionStep, num_sampled: int) -> None:
        hidden_NE = self._model.forward(step.tokens_N, step.positions_N, attend)
        if self._sampled_RE is None:
            most = max(self._max_sampled, *self._sizes, 1)
            self._sampled_RE = hidden_NE.new_zeros((most, hidden_NE.shape[1]))
        rows_R = step.sampled_N[:num_sampled]
        torch.index_select(hidden_NE, 0, rows_R, out=self._sampled_RE[:num_sampled])

    def _head(self, num_sampled: int) -> None:
        self._choose(self._logits(num_sampled), num_sampled)

    def _logits(self, num_sampled: int) -> Tensor:
        assert self._sampled_RE is not None
        return self._model.logits(self._sampled_RE[:num_sampled])

    def _choose(self, logits_RV: Tensor, num_sampled: int) -> None:
        self._buffers.unpack_samples(num_sampled)
        picks_R = self._buffers.picks_R[:num_sampled]
        self._picker(logits_RV, self._buffers.sample_table(num_sampled), picks_R)
        self._ranks.share_(picks_R)

    def _pick(self, batch: ScheduledBatch, padded: int, num_sampled: int) -> Scores | None:
        """Runs the head. Returns the scores of the picks if any are wanted."""
        specs = [item.sample for item in batch.items if item.sample is not None]
        scored = any(spec.logprobs for spec in specs)
        if not scored and not any(spec.edits_logits for spec in specs):
            self._graphs.run(("head", padded), partial(self._head, padded))
            return None
        raw_RV = self._logits(padded)
        masks = masks_of(batch.items)
        edited_RV = allowed_rows(raw_RV, masks).to(torch.float32, copy=not masks)
        by_row = [
            item.sample for item in batch.items for _ in range(1 + item.num_drafts) if item.sample is not None
        ]
        self._penalties.apply(edited_RV, dict(enumerate(by_row)))
        for row, spec in enumerate(by_row):
            add_bias(edited_RV[row], spec.params)
        self._choose(edited_RV, padded)
        if not scored:
            return None
        most = max(spec.top_logprobs for spec in specs)
        return Scores.of(raw_RV[:num_sampled], self._buffers.picks_R[:num_sampled], most).fetched()

    def _launch_carefully(self, batch: ScheduledBatch) -> Launch:
        """Runs the batch at once, and leaves its picks where the next batch looks for them."""
        assert batch.num_steps == 1
        self._buffers.miss(batch.items)
        if any(item.pending_from is not None for item in batch.items):
            picks = self._buffers.picks_R.tolist()
            batch = ScheduledBatch([self._known(item, picks) for item in batch.items])
        output = self._careful.run(batch)
        last = torch.tensor([entry.token_ids[-1] if entry.token_ids else 0 for entry in output.items])
        self._buffers.picks_R[: len(last)].copy_(last)
        self._ranks.share_(self._buffers.picks_R[: len(last)])
        self._last_rows = list(range(len(last)))
        return Done(output)

    def _known(self, item: BatchItem, picks: list[int]) -> BatchItem:
        if item.pending_from is None:
            return item
        return replace(item, token_ids=[picks[self._last_rows[item.pending_from]]])


def _needs_host(item: BatchItem) -> bool:
    """True for scores of input tokens, and for drafts whose picks depend on the picks before them."""
    seen = item.sample.seen if item.sample is not None else None
    return item.input_logprobs_from is not None or (item.num_drafts > 0 and seen is not None)


def _lens_like(shape: StepShape, longest: int) -> list[ItemLens]:
    """Lengths of a step of this shape whose first items have `longest` rows, and no history."""
    left, lens = shape.rows, []
    for _ in range(shape.items):
        lens.append(ItemLens(min(left, longest), min(left, longest)))
        left -= lens[-1].queries
    return lens


def _last_rows(items: list[BatchItem]) -> list[int]:
    """The row of each item's last pick; any row for items that do not sample."""
    rows, end = [], 0
    for item in items:
        if item.sample is not None:
            end += 1 + item.num_drafts
        rows.append(end - 1)
    return rows
