"""`serve run` with a key that does not exist: refused at start, by name."""

from __future__ import annotations

from typing import Any

from served_cluster import ROOT, ServedCluster, eventually


def misspell(document: dict[str, Any]) -> None:
    args = document["applications"][0]["args"]
    args["cache"] = {"page_sise": 16}


def test_unknown_key_is_refused_by_name() -> None:
    served = ServedCluster(ROOT / "configs" / "cluster.yaml", misspell)
    served.start(wait=False)
    try:
        eventually(lambda: "unknown key 'page_sise'; did you mean 'page_size'?" in served.log_text(), 120)
    finally:
        served.stop()


def fp8_on_a_cpu(document: dict[str, Any]) -> None:
    args = document["applications"][0]["args"]
    args["cache"] = {"kv_dtype": "fp8"}


def test_a_replica_that_cannot_start_says_why_and_nothing_else() -> None:
    """Serve tears down what never came to be, which complained of its own missing parts."""
    served = ServedCluster(ROOT / "configs" / "cluster.yaml", fp8_on_a_cpu)
    served.start(wait=False)
    try:
        eventually(lambda: served.log_text().count("it has no fp8 KV; triton has") > 2, 120)
        assert "has no attribute" not in served.log_text()
    finally:
        served.stop()
