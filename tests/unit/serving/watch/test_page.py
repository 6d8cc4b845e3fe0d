"""The page of a cluster: it has each family once, and includes the controller's figures."""

from __future__ import annotations

from controllers.histogram import Histogram, Measure
from serving.watch.definitions import DEFINITIONS
from serving.watch.metrics import FailoverCause, IngressMetrics, ReplicaMetrics
from serving.watch.page import cluster_page, controller_figures, merge_expositions
from serving.watch.registry import Figure
from tests.unit.serving.engine_figures import stats
from tests.unit.serving.metric_samples import samples

LABELS = {"cluster": "east", "model": "m"}
EVERYWHERE = (("cluster", "east"), ("model", "m"))


def test_merged_page_has_every_family_once_and_every_sample() -> None:
    ingress = IngressMetrics("front")
    ingress.failed_over(FailoverCause.LOST)
    parts = [ReplicaMetrics(name, stats).render() for name in ("a", "b")]
    parts.append(ingress.render_others([Figure("kedge_controller_sessions_idle", 3.0, ("0",))]))
    parts.append(ingress.render())
    page = merge_expositions(parts)
    types = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    apart: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for part in parts:
        apart |= samples(part)
    merged = samples(page)
    assert merged == apart
    assert merged["kedge_failovers_total", (("cause", "lost"), ("ingress", "front"))] == 1
    assert merged["kedge_controller_sessions_idle", (("shard", "0"),)] == 3


def test_odd_values_of_labels_stay_whole() -> None:
    odd = 'a"b\\c\nd # TYPE x'
    metrics = ReplicaMetrics(odd, stats, LABELS)
    metrics.tenant_kv({(odd, "device"): 7}, 0)
    page = merge_expositions([metrics.render(), ReplicaMetrics("b", stats).render()])
    assert (
        samples(page)[
            "kedge_tenant_kv_bytes", (*EVERYWHERE, ("replica", odd), ("tenant", odd), ("tier", "device"))
        ]
        == 7
    )


def test_nothing_to_merge() -> None:
    assert merge_expositions([]) == ""
    assert merge_expositions(["", ""]) == ""


def test_what_the_page_says_of_itself() -> None:
    metrics = IngressMetrics("front", LABELS)
    others = [("front", "not this"), ("behind", IngressMetrics("behind", LABELS).render())]
    page = cluster_page(metrics, ["", ""], others, (), controller_up=False, present=3, expected=4)
    found = samples(page)
    assert found["kedge_replicas_expected", EVERYWHERE] == 4
    assert found["kedge_scrape_missing_replicas", EVERYWHERE] == 1
    assert found["kedge_controller_up", EVERYWHERE] == 0
    assert "not this" not in page
    for name in ("front", "behind"):
        assert found["kedge_takeovers_total", (EVERYWHERE[0], ("ingress", name), EVERYWHERE[1])] == 0
    assert (
        samples(cluster_page(metrics, [], (), (), controller_up=True, present=0, expected=1))[
            "kedge_controller_up", EVERYWHERE
        ]
        == 1
    )


def test_histograms_of_the_controller() -> None:
    name = "controller_store_seconds"
    took_s = Histogram(DEFINITIONS[f"kedge_{name}"].buckets)
    for value in (0.0005, 0.004, 99.0):
        took_s.observe(value)
    figures = list(controller_figures([took_s.measure(name, ("shard", "0"), ("operation", "commit"))]))
    found = samples(IngressMetrics("f").render_others(figures))
    operation = (("operation", "commit"), ("shard", "0"))
    assert found[f"kedge_{name}_count", operation] == 3
    assert found[f"kedge_{name}_sum", operation] == 99.0045
    buckets = {
        bound: found[f"kedge_{name}_bucket", (("le", bound), *operation)]
        for bound in ("0.0005", "0.005", "+Inf")
    }
    assert buckets == {"0.0005": 1, "0.005": 2, "+Inf": 3}


def test_what_a_later_controller_tells_is_left_out() -> None:
    later = [
        Measure("controller_of_tomorrow", 1.0, (("shard", "0"),)),
        Measure("controller_sessions_idle", 1.0, (("shard", "0"), ("tenant", "t"))),
        Measure("controller_commit_group_turns", 1.0, (("shard", "0"),), (1, 2)),
    ]
    assert list(controller_figures(later)) == []
