"""The engine with adapters: whose KV is shared with whom, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.api import AdapterNotLoaded, GenerateRequest, SamplingParams, TokenDelta
from engine.build import build_engine
from engine.engine import LocalEngine
from engine.models.config import parse_spec
from engine.models.errors import UnsupportedModel
from engine.settings import (
    AdapterSettings,
    CacheSettings,
    EngineSettings,
    ExecutionSettings,
    ModelSettings,
)
from tests.unit.engine.models.adapter_files import write_adapter
from tests.unit.engine.tiny_llama import TINY_LLAMA

PAGE_SIZE = 4
PROMPT = list(range(3, 15))


class AdaptedEngine:
    """An engine that is stepped by hand. "twin" has the contents of "mine"."""

    def __init__(self, directory: Path) -> None:
        self.deltas: list[TokenDelta] = []
        self.engine: LocalEngine = build_engine(settings_of(directory), self._take)
        self._names = 0

    def _take(self, deltas: Sequence[TokenDelta]) -> None:
        self.deltas += deltas

    def run(self, tokens: list[int], adapter: str = "", **options: Any) -> TokenDelta:
        """The last delta of a request of four tokens."""
        self._names += 1
        sampling = SamplingParams(4, temperature=0.0)
        self.engine.submit(GenerateRequest(f"r{self._names}", tokens, sampling, adapter=adapter, **options))
        self.step()
        return self.deltas[-1]

    def step(self) -> None:
        self.engine._drain_inbox(block=False)
        while self.engine.step():
            pass

    def output(self) -> list[int]:
        """That of the last request."""
        name = f"r{self._names}"
        return [token for delta in self.deltas if delta.request_id == name for token in delta.token_ids]


def settings_of(directory: Path, **execution: Any) -> EngineSettings:
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA))
    spec = parse_spec(TINY_LLAMA)
    mine, other = (
        write_adapter(directory / name, spec, 3, seed=seed) for name, seed in (("mine", 1), ("other", 2))
    )
    adapters = (mine, other, AdapterSettings("twin", mine.path))
    model = ModelSettings(str(directory), "dummy", device="cpu", num_threads=1, adapters=adapters)
    return EngineSettings(
        model, CacheSettings(PAGE_SIZE, 64, books="strict"), execution=ExecutionSettings(**execution)
    )


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[AdaptedEngine]:
    rig = AdaptedEngine(tmp_path)
    yield rig
    rig.engine.stop(5.0)


def test_prefixes_are_shared_among_requests_of_the_same_adapter(rig: AdaptedEngine) -> None:
    cached = {name: [rig.run(PROMPT, name).cached_tokens for _ in range(2)] for name in ("", "mine", "other")}
    assert cached == {name: [0, 8] for name in ("", "mine", "other")}


def test_adapters_of_the_same_contents_share_prefixes(rig: AdaptedEngine) -> None:
    """KV is apart by what an adapter is, not by what it is called: another replica may have another of that name."""
    rig.run(PROMPT, "mine")
    output = rig.output()
    assert rig.run(PROMPT, "twin").cached_tokens == 8
    assert rig.output() == output
    assert rig.engine.adapters["mine"] == rig.engine.adapters["twin"] != rig.engine.adapters["other"]


def test_salts_and_adapters_do_not_run_into_one_another(rig: AdaptedEngine) -> None:
    fingerprint = rig.engine.adapters["mine"]
    names = ["acme", "acme\0salt", f"acme\0{fingerprint}\1", f"acme\0{fingerprint}\1acme"]
    for name in names:
        for adapter in ("", "mine"):
            assert rig.run(PROMPT, adapter, namespace=name).cached_tokens == 0


def test_a_session_that_changes_its_adapter_computes_its_history_anew(rig: AdaptedEngine) -> None:
    history: list[int] = []
    cached = []
    for number, adapter in enumerate(["mine", "mine", "other", "", "mine", "mine"]):
        chain = rig.engine.empty_chain("", adapter)
        chain.extend(history)
        new_tokens = [20 + number, 30 + number]
        lent = {"history": history, "history_len": len(history), "history_chain": chain}
        cached.append(rig.run(new_tokens, adapter, session_id="s", **lent).cached_tokens)
        output = rig.output()
        assert rig.run([*history, *new_tokens], adapter, namespace=f"fresh {number}").cached_tokens == 0
        assert rig.output() == output
        history = [*history, *new_tokens, *output]
    assert cached == [0, 5, 0, 0, 0, 29]


def test_kv_counts_for_the_tenant_whatever_its_adapter(rig: AdaptedEngine) -> None:
    for number, adapter in enumerate(("", "mine", "other")):
        rig.run(PROMPT, adapter, session_id=f"s{number}", namespace="acme")
    census = rig.engine.kv_census()
    rig.step()
    assert {namespace for namespace, _ in census.result(5.0).num_bytes} == {"acme"}


def test_an_adapter_that_is_not_loaded_is_refused(rig: AdaptedEngine) -> None:
    with pytest.raises(AdapterNotLoaded, match="'theirs'") as refused:
        rig.run(PROMPT, "theirs")
    assert (refused.value.code, refused.value.param) == ("adapter_not_loaded", "model")
    with pytest.raises(AdapterNotLoaded):
        rig.engine.empty_chain("", "theirs")


def test_attention_without_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"execution\.attention cpu, not torch"):
        build_engine(settings_of(tmp_path, attention="torch"), lambda _: None)


def test_the_engine_says_which_adapters_it_has(rig: AdaptedEngine) -> None:
    assert rig.engine.describe()["adapters"] == "mine, other, twin"
