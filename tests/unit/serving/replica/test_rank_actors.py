"""The resources that a replica with several ranks asks Ray for."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.deployment import Application

from serving.app import build
from serving.replica.rank_actors import placement_options
from serving.settings.config import AppArgs, parse_args
from serving.settings.strict_settings import SettingsError

MODEL = {"path": "assets/models/kedge-chat"}


def args(size: int, model: dict[str, Any] | None = None, **replicas: Any) -> AppArgs:
    return parse_args(
        {"model": {**MODEL, **(model or {})}, "execution": {"tensor_parallel": size}, "replicas": replicas}
    )


def replica_config(application: Application) -> Any:
    """The configuration of the replicas' deployment, to which the ingress is bound."""
    (bound,) = (arg for arg in application._bound_deployment.init_args if isinstance(arg, Application))
    return bound._bound_deployment._replica_config


def test_one_rank_needs_no_placement_group() -> None:
    assert placement_options(args(1, num_gpus=1)) == {}
    assert replica_config(build(args(1).model_dump())).placement_group_bundles is None


def test_each_rank_has_a_bundle_with_all_it_needs() -> None:
    """Ray Serve accepts these bundles and puts the replica into the first one."""
    config = replica_config(build(args(4, {"device": "cuda"}, num_cpus=2, num_gpus=1).model_dump()))
    assert config.placement_group_bundles == [{"CPU": 2, "GPU": 1}] * 4
    assert config.placement_group_strategy == "STRICT_PACK"
    assert (config.ray_actor_options["num_cpus"], config.ray_actor_options["num_gpus"]) == (2, 1)
    config = replica_config(build(args(2, num_cpus=0.25).model_dump()))
    assert config.placement_group_bundles == [{"CPU": 0.25}] * 2


def test_a_wrong_path_is_refused_before_any_replica_starts() -> None:
    """The error has the same words as that of `python -m serving.settings.config`."""
    with pytest.raises(SettingsError, match=r"args\.model\.path: there is no directory '/no/such/model'"):
        build({"model": {"path": "/no/such/model"}})


@pytest.mark.parametrize(
    ("model", "replicas", "reason"),
    [
        ({"device": "cuda"}, {}, "num_gpus 1, for each rank, not 0"),
        ({"device": "cuda"}, {"num_gpus": 2}, "num_gpus 1, for each rank, not 2"),
        ({}, {"num_cpus": 0}, "needs num_cpus or num_gpus"),
    ],
)
def test_ranks_without_room_are_refused(model: dict[str, Any], replicas: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=rf"args\.replicas: .*{reason}"):
        args(2, model, **replicas)
    assert args(1, model, **replicas)
