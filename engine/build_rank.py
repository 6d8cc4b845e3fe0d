"""One rank's part of the composition root: the model, or its share of it, with a runner around it."""

from __future__ import annotations

from dataclasses import replace

from engine.build_runner import build_runner
from engine.device import resolve_device
from engine.memory import memory_for
from engine.models.errors import UnsupportedModel
from engine.models.loader import LoadedModel, load_model
from engine.models.ops import choose_ops
from engine.parallel.ranks import RankGroup
from engine.parallel.shared_logits import SharedLogits
from engine.runner.protocol import Runner
from engine.settings import EngineSettings, LinearName, SpeculationSettings


def make_runner(settings: EngineSettings, ranks: RankGroup) -> Runner:
    """The runner of `make_rank`."""
    return make_rank(settings, ranks)[0]


def make_rank(settings: EngineSettings, ranks: RankGroup) -> tuple[Runner, LoadedModel]:
    """A runner and the model in it. Several ranks call this at the same time. Raises what build_engine raises."""
    speculation = settings.speculation
    linear = settings.execution.linear
    device = resolve_device(settings.model.device)
    with memory_for(device, "the model", "model.path, model.dtype, execution.tensor_parallel"):
        loaded = load_model(settings.model, ops=choose_ops(device), ranks=ranks, linear=linear)
    runner = build_runner(
        loaded,
        settings.cache,
        _load_draft(loaded, speculation, ranks, linear),
        scheduler=settings.scheduler,
        execution=settings.execution,
        num_drafts=speculation.max_draft_tokens if speculation.method != "off" else 0,
        ranks=ranks,
    )
    return runner, loaded


def _load_draft(
    target: LoadedModel, speculation: SpeculationSettings, ranks: RankGroup, linear: LinearName
) -> LoadedModel | None:
    """Each rank has the draft model whole, and its proposals from rank 0."""
    if speculation.method != "draft":
        return None
    if speculation.draft_model is None:
        raise UnsupportedModel("speculation with a draft model needs draft_model")
    device = resolve_device(speculation.draft_model.device)
    with memory_for(device, "the draft model", "speculation.draft_model"):
        draft = load_model(speculation.draft_model, ops=choose_ops(device), linear=linear)
    if draft.vocab_size != target.vocab_size:
        raise UnsupportedModel(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens, the model one of {target.vocab_size}"
        )
    return draft if ranks.size == 1 else replace(draft, model=SharedLogits(draft.model, ranks))
