"""A real Prometheus that scrapes a live cluster under load answers every query of every panel of the dashboards."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_prometheus import MONITORING, LivePrometheus, installed
from served_cluster import ServedCluster, eventually
from watched_cluster import clients, session_of_two_turns, watched

sys.path.insert(0, str(MONITORING / "grafana"))

from boards import BOARDS
from panels import Query
from write_boards import VARIABLES, document, expression

pytestmark = pytest.mark.skipif(not installed(), reason="prometheus is not installed (Debian's package)")

CHOSEN = {"$__rate_interval": "5s", "$cluster": "tested", "$model": ".*", "$replica": ".*"}


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> ServedCluster:
    shared_cluster.use(watched)
    return shared_cluster


@pytest.fixture(scope="module")
def prometheus(cluster: ServedCluster) -> Iterator[LivePrometheus]:
    live = LivePrometheus(cluster.port, (1.0,))
    try:
        live.start()
        yield live
    finally:
        live.stop()


def filled_in(query: str) -> str:
    for variable, value in CHOSEN.items():
        query = query.replace(variable, value)
    assert "$" not in query
    return query


def test_each_query_of_each_panel_has_data(cluster: ServedCluster, prometheus: LivePrometheus) -> None:
    """Except the queries that a dashboard marks as rarely having data."""

    def whole_conversation(client: httpx.Client, rng: Any) -> int:
        messages = [{"role": "user", "content": f"number {rng.randrange(10**9)}"}]
        body = {"model": "kedge-chat", "max_tokens": 4, "messages": messages}
        return client.post("/v1/chat/completions", json=body).status_code

    queries = [
        query for board in BOARDS for row in board.rows for panel in row.panels for query in panel.queries
    ]
    expected = [query for query in queries if not query.rarely]

    def empty() -> list[Query]:
        return [query for query in expected if not prometheus.has_numbers(filled_in(expression(query)))]

    with clients(cluster, 4, session_of_two_turns), clients(cluster, 2, whole_conversation, 0.1) as told:
        try:
            eventually(lambda: not empty(), 40.0, 1.0)
        except AssertionError:
            raise AssertionError([expression(query) for query in empty()]) from None
    assert set(told) == {200}
    for query in queries:
        prometheus.query(filled_in(expression(query)))  # queries without data must at least be valid


def test_the_variables_offer_what_there_is(cluster: ServedCluster, prometheus: LivePrometheus) -> None:
    """Asks as Grafana does: for the values of one label of the series that a selector chooses."""
    found = {}
    for name, query in VARIABLES:
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        assert asked is not None
        values = {each["metric"].get(asked[2]) for each in prometheus.query(filled_in(asked[1]))}
        found[name] = values
    assert found["cluster"] == {"tested"}
    assert found["replica"] == set(cluster.replicas())


def test_the_annotations_are_understood(prometheus: LivePrometheus) -> None:
    for board in BOARDS:
        for annotation in document(board)["annotations"]["list"]:
            prometheus.query(filled_in(annotation["expr"]))
