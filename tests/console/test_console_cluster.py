"""The console of a real cluster of two replicas. It shows that one dies in use and the other takes its session over."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import expect

from tests.cluster.served_cluster import ROOT, ServedCluster, eventually
from tests.console.browser import Opened

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
BACK_MS = 120_000
"""Time limit for a killed replica to be back. Its process starts and loads the model."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServedCluster]:
    served = ServedCluster(ROOT / "configs" / "cluster.yaml")
    try:
        served.start()
        yield served
    finally:
        served.stop()


def test_it_watches_a_replica_die_and_the_takeover(
    cluster: ServedCluster, console: Callable[..., Opened]
) -> None:
    opened = console(cluster.url).live()
    page = opened.page
    replicas = page.get_by_role("article")
    expect(replicas).to_have_count(2)
    page.get_by_label("Most tokens").fill("20")
    session = page.get_by_label("Session", exact=True).input_value()
    opened.say("Hello, my dog is called Rex.")
    opened.say("What is my dog called?")
    owner = opened.effects()[1]["at"].split(",")[0]
    assert owner == cluster.sessions()[session]["replica_id"]
    cluster.kill(cluster.replicas()[owner]["pid"])

    events = page.locator("#events")
    down = events.locator("li.replica_down")
    expect(down.first).to_contain_text(owner)
    opened.say("And what is it called now?")
    takeover = events.locator("li.taken_over")
    expect(takeover.first).to_contain_text(session)
    effect = opened.effects()[2]
    taker = effect["at"].split(",")[0]
    assert effect["at"] == f"{taker}, device, epoch 2"
    assert taker != owner
    expect(takeover.first).to_contain_text(f"from {owner} · to {taker}")
    expect(replicas.filter(has_text=owner)).to_have_count(0)

    up = events.locator("li.replica_up")
    newcomers = up.filter(has_not_text=owner).filter(has_not_text=taker)
    expect(newcomers.first).to_be_visible(timeout=BACK_MS)
    expect(replicas).to_have_count(2, timeout=BACK_MS)
    expect(page.locator("#alarm")).to_be_hidden()
    assert eventually(lambda: cluster.pages()["leaked"] == 0)


def test_it_watches_a_drain(cluster: ServedCluster, console: Callable[..., Opened]) -> None:
    opened = console(cluster.url).live()
    page = opened.page
    page.get_by_label("Most tokens").fill("5")
    opened.say("Hello.")
    owner = opened.effects()[0]["at"].split(",")[0]
    with cluster.client() as client:
        client.post(f"/v1/kedge/replicas/{owner}/drain").raise_for_status()
    events = page.locator("#events")
    expect(events.locator("li.drained").first).to_contain_text(owner)
    expect(events.locator("li.moved").first).to_contain_text("its replica drains")
    expect(events.locator("li.replica_down").first).to_contain_text(owner)
