"""How many replicas the application asks Ray Serve for."""

from __future__ import annotations

from typing import Any

from ray.serve.deployment import Application

from serving.app import build


def replicas_config(**replicas: Any) -> Any:
    """Serve's configuration of the replicas' deployment."""
    application = build({"model": {"path": "assets/models/kedge-chat"}, "replicas": replicas})
    (bound,) = (arg for arg in application._bound_deployment.init_args if isinstance(arg, Application))
    return bound._bound_deployment._deployment_config


def test_the_number_of_replicas_is_as_set() -> None:
    fixed = replicas_config(count=3)
    assert (fixed.num_replicas, fixed.autoscaling_config) == (3, None)
    delays = {"look_back_s": 17.0, "upscale_delay_s": 8.0, "downscale_delay_s": 9.0}
    found = replicas_config(autoscaling={"min_replicas": 2, "max_replicas": 4, **delays}).autoscaling_config
    assert (found.min_replicas, found.max_replicas) == (2, 4)
    assert (found.look_back_period_s, found.upscale_delay_s, found.downscale_delay_s) == (17.0, 8.0, 9.0)
