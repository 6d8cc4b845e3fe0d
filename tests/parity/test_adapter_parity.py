"""Sessions with adapters against transformers and PEFT in float32, under everything that tests/parity/test_matrix.py
has, and the bits of deterministic steps.

Requests with several adapters and without one run beside each other, and sessions change their adapter now and then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers

from engine.models.loader import LoadedModel, load_model
from engine.settings import ModelSettings
from tests.parity.matrix_cell import Cell, CellRun
from tests.parity.place import DEVICE
from tests.parity.test_deterministic import SinglePasses, cells_of, name_of
from tests.parity.test_matrix import TINY, assert_scored
from tests.parity.test_schedules import assert_greedy
from tests.unit.engine.models.peft_adapters import adapted, running

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="adapters are applied on a CPU only")

ADAPTERS = ["all", "some", "uneven"]
OF_A_CELL = ("", *ADAPTERS)
FAMILIES: dict[str, Any] = {
    "mistral": transformers.MistralConfig(**TINY, sliding_window=None),
    "windowed": transformers.MistralConfig(**TINY, sliding_window=12),
    "qwen3": transformers.Qwen3Config(**TINY, head_dim=16),
}


@dataclass
class Models:
    """A model with adapters as PEFT has it, and as the engine has it: usual, and deterministic. The draft model has no
    adapters."""

    reference: Any
    target: LoadedModel
    exact: LoadedModel
    draft: LoadedModel


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.manual_seed(13)
    model: Any = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param], dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
    directory, of_draft = tmp_path_factory.mktemp(request.param), tmp_path_factory.mktemp("draft")
    model.save_pretrained(directory)
    windows = transformers.AutoConfig.from_pretrained(directory).sliding_window
    model.config.sliding_window = None
    model.save_pretrained(of_draft)
    model.config.sliding_window = windows
    settings = ModelSettings(str(directory), dtype="float32", device="cpu", num_threads=1)
    draft = load_model(replace(settings, path=str(of_draft)))
    reference, adapters = adapted(model.eval(), directory, ADAPTERS)
    settings = replace(settings, adapters=tuple(adapters))
    return Models(reference, load_model(settings), load_model(settings, deterministic=True), draft)


@pytest.mark.parametrize(
    ("models", "cell"),
    [
        pytest.param(
            model, cell, id=f"{model}-{name_of(cell)}", marks=[pytest.mark.slow] * (not cell.chunked)
        )
        for model, cell in (each.values for each in cells_of(FAMILIES, 700, adapters=OF_A_CELL))
    ],
    indirect=["models"],
)
def test_every_request_has_the_tokens_of_its_adapter(models: Models, cell: Cell) -> None:
    run = CellRun(cell, models.target, models.draft if cell.speculation == "draft" else None)
    run.run()
    assert len(run.finished) >= 30
    assert run.events["other adapter"] > 3
    for adapter in OF_A_CELL:
        reference = running(models.reference, adapter)
        finished = [each for each in run.finished if each.adapter == adapter]
        assert finished, f"seed {cell.seed}: none with {adapter!r}"
        assert_greedy(reference, finished)
        assert_scored(reference, [each for each in run.scored if each.adapter == adapter])


@pytest.mark.parametrize("models", FAMILIES, indirect=True)
def test_adapters_change_the_tokens(models: Models) -> None:
    """Else the other tests would show nothing."""
    prompt = torch.arange(20)[None]
    with torch.inference_mode():
        logits = [running(models.reference, adapter)(prompt).logits for adapter in OF_A_CELL]
    picks = {tuple(each.argmax(-1)[0].tolist()) for each in logits}
    assert len(picks) == len(OF_A_CELL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("models", "cell"),
    cells_of(FAMILIES, 700, top=int(TINY["vocab_size"]), adapters=OF_A_CELL),
    indirect=["models"],
)
def test_what_ran_beside_a_request_changes_no_bit_of_it(models: Models, cell: Cell) -> None:
    run = CellRun(cell, models.exact, models.draft if cell.speculation == "draft" else None)
    run.run()
    passes = SinglePasses(models.exact, cell.page_size)
    for each in run.finished:
        assert each.logprobs == passes.logprobs(each), (each.what, each.adapter, cell.seed)
    passes.close()
