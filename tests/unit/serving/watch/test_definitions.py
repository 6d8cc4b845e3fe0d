"""A live cluster serves exactly the defined metrics: names, kinds and labels. docs/metrics.md lists the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from serving.watch.definitions import CONSTANT_LABELS, DEFINITIONS, LABELS
from serving.watch.metric_definition import Definition, Kind
from tests.unit.serving.local_service import local_client
from tests.unit.serving.replica_rig import METRIC_LABELS

ROOT = Path(__file__).parents[4]
HELLO = {"role": "user", "content": "hello"}


@pytest.fixture
async def families(tmp_path: Path) -> dict[str, Metric]:
    """The metrics of a cluster that has had turns of every kind and a refused request."""
    async with local_client(tmp_path) as (client, _):
        chat = {"model": "null-model", "messages": [HELLO], "max_tokens": 4}
        for body, headers in (
            (chat, {}),
            ({**chat, "stream": True}, {"x-session-id": "s", "x-tenant-id": "anna"}),
            ({**chat, "max_tokens": -1}, {}),
        ):
            await client.post("/v1/chat/completions", json=body, headers=headers)
        text = (await client.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


async def test_all_that_is_served_is_defined(families: dict[str, Metric]) -> None:
    assert sorted(set(families) - set(DEFINITIONS)) == []


async def test_all_that_is_defined_is_served(families: dict[str, Metric]) -> None:
    assert sorted(set(DEFINITIONS) - set(families)) == []


async def test_kinds_helps_and_labels_agree(families: dict[str, Metric]) -> None:
    for name, family in families.items():
        known = DEFINITIONS[name]
        assert (family.type, family.documentation) == (known.kind.value, known.help), name
        wanted = {*CONSTANT_LABELS, *known.labels}
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == wanted, sample
            assert METRIC_LABELS.items() <= sample.labels.items()


async def test_buckets_agree(families: dict[str, Metric]) -> None:
    for known in _histograms():
        bounds = {
            float(sample.labels["le"])
            for sample in families[known.name].samples
            if sample.name.endswith("_bucket")
        }
        assert bounds == {*known.buckets, float("inf")}, known.name


def test_names_tell_the_unit() -> None:
    for known in DEFINITIONS.values():
        assert known.name.startswith("kedge_")
        assert not known.name.endswith("_total")
        if known.unit == "seconds":
            assert known.name.endswith("_seconds"), known.name
        if known.unit == "bytes":
            assert known.name.endswith("_bytes"), known.name
        assert bool(known.buckets) is (known.kind is Kind.HISTOGRAM), known.name
        assert list(known.buckets) == sorted(known.buckets)
        assert known.help.endswith("."), known.name


def test_labels_are_explained() -> None:
    used = {label for known in DEFINITIONS.values() for label in known.labels}
    assert used | set(CONSTANT_LABELS) == set(LABELS)


def test_no_label_names_a_session() -> None:
    assert not any("session" in label or "request" in label for label in LABELS)


def test_the_page_is_that_of_the_definitions() -> None:
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / "docs" / "metrics.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert page.PAGE.read_text() == page.page(), "python docs/metrics.py writes it anew"


def _histograms() -> list[Definition]:
    return [known for known in DEFINITIONS.values() if known.kind is Kind.HISTOGRAM]
