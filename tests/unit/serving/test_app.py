"""What the application tells Ray Serve, and Serve every process that runs."""

from __future__ import annotations

from ray import cloudpickle
from ray.serve.deployment import Application

from serving.app import build
from serving.front.router import PinnedRequestRouter

ARGS = {"model": {"path": "assets/models/kedge-chat"}}


def test_each_process_loads_its_own_router() -> None:
    """Pickled by value it named what a front end of the version before does not have. Serve's callback raised there,
    and that front end heard of no replica any more."""
    (replicas,) = (arg for arg in build(ARGS)._bound_deployment.init_args if isinstance(arg, Application))
    config = replicas._bound_deployment._deployment_config.request_router_config
    pickled = config.get_serialized_request_router_cls()
    assert cloudpickle.loads(pickled) is PinnedRequestRouter
    assert len(pickled) < 100, "more than the class's module and name"
