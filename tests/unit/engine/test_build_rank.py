"""One rank's model and draft model, as they are loaded for where they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine import build_rank as composition
from engine.build_rank import make_rank
from engine.models.loader import load_model
from engine.models.ops import TorchOps
from engine.parallel.ranks import OneRank
from engine.settings import CacheSettings, EngineSettings, ModelSettings, SpeculationSettings
from tests.unit.engine.tiny_llama import TINY_LLAMA


def test_the_draft_model_has_the_operators_of_its_device_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    model = ModelSettings(str(tmp_path), load_format="dummy", device="cpu")
    chosen, given = TorchOps(), []

    def load(settings: ModelSettings, **options: Any) -> Any:
        given.append(options.get("ops"))
        return load_model(settings, **options)

    monkeypatch.setattr(composition, "choose_ops", lambda _device: chosen)
    monkeypatch.setattr(composition, "load_model", load)
    speculation = SpeculationSettings(method="draft", draft_model=model)
    runner, _ = make_rank(EngineSettings(model, CacheSettings(4, 4), speculation=speculation), OneRank())
    runner.close()
    assert given == [chosen, chosen]
