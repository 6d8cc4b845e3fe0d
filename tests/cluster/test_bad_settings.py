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
