"""KubeRay, Kubernetes, Ray Serve and Kedge understand configs/kubernetes/, and its parts match each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray
import yaml
from kuberay_schema import RAY_SERVICE
from ray.serve.schema import ServeDeploySchema

from controllers.settings import REDIS_PASSWORD, RedisLogSettings
from serving.settings.config import AppArgs, check_file

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "kubernetes"
BUILT_IN = FOLDER.parents[1] / "assets" / "models" / "kedge-chat"
MODEL = "/models/model"
KUBERNETES = "1.33"

Json = dict[str, Any]


@pytest.fixture
def service() -> Json:
    document: Json = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())
    return document


@pytest.fixture
def args(service: Json, tmp_path: Path) -> AppArgs:
    """The application's settings as `serve run` would read them, but with an existing model. Raises SettingsError."""
    config = tmp_path / "serve.yaml"
    config.write_text(service["spec"]["serveConfigV2"].replace(MODEL, str(BUILT_IN)))
    (application,) = check_file(str(config))
    return application


def pods(service: Json) -> dict[str, Json]:
    cluster = service["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {name: group["template"] for name, group in {"head": cluster["headGroupSpec"], **groups}.items()}


def check_service(service: Json) -> None:
    """Raises ValidationError if KubeRay, or Kubernetes for the pods, does not know a field or its value."""
    jsonschema.validate(service, RAY_SERVICE)
    for template in pods(service).values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_kuberay_and_kubernetes_know_every_field(service: Json) -> None:
    check_service(service)


def test_kubernetes_knows_every_field_of_redis() -> None:
    documents = list(yaml.safe_load_all((FOLDER / "redis.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["Service", "StatefulSet"]
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_redis_refuses_changes_before_kubernetes_kills_it() -> None:
    """Without maxmemory, noeviction did nothing. Half of the limit is for the fork of a rewrite of its file."""
    _, statefulset = yaml.safe_load_all((FOLDER / "redis.yaml").read_text())
    (container,) = statefulset["spec"]["template"]["spec"]["containers"]
    arguments = container["args"][0].split()
    most_gib = int(arguments[arguments.index("--maxmemory") + 1].removesuffix("gb"))
    assert 2 * most_gib <= int(container["resources"]["limits"]["memory"].removesuffix("Gi"))


def _misspelled(path: str) -> Callable[[Json], None]:
    def misspell(service: Json) -> None:
        at: Any = service["spec"]
        *parents, last = path.split(".")
        for key in parents:
            at = at[int(key) if key.isdecimal() else key]
        at[last + "x"] = at.pop(last)

    return misspell


@pytest.mark.parametrize(
    "path",
    [
        "upgradeStrategy.type",
        "rayClusterConfig.authOptions.mode",
        "rayClusterConfig.gcsFaultToleranceOptions.redisAddress",
        "rayClusterConfig.workerGroupSpecs.0.maxReplicas",
        "rayClusterConfig.headGroupSpec.template.spec.terminationGracePeriodSeconds",
        "rayClusterConfig.workerGroupSpecs.0.template.spec.containers.0.volumeMounts",
    ],
)
def test_a_misspelled_field_is_found(service: Json, path: str) -> None:
    _misspelled(path)(service)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check_service(service)


def test_ray_serve_and_kedge_take_the_application(service: Json, args: AppArgs) -> None:
    ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert isinstance(args.controller.log_settings(), RedisLogSettings), "the head's disk ends with its pod"
    cluster = service["spec"]["rayClusterConfig"]
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert cluster["rayVersion"] == ray.__version__
    assert f"ARG RAY={ray.__version__}-" in dockerfile


def test_ray_asks_for_a_token(service: Json) -> None:
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_a_replica_and_an_ingress_fit_on_each_worker(service: Json, args: AppArgs) -> None:
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert args.replicas.num_cpus + args.ingress.num_cpus <= float(container["resources"]["requests"]["cpu"])
    scaling = args.replicas.autoscaling
    assert scaling is not None
    assert scaling.min_replicas <= group["minReplicas"], "no pod is waited for at start"
    assert scaling.max_replicas < group["maxReplicas"], (
        "each has a pod to go to, and in a redeploy one more has"
    )
    memory_gib = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert args.cache.size_mib is not None
    assert args.cache.host_mib is not None
    assert (args.cache.size_mib + args.cache.host_mib) / 1024 < memory_gib


def test_pods_end_after_their_turns(service: Json, args: AppArgs) -> None:
    worker = pods(service)["replicas"]["spec"]
    assert worker["terminationGracePeriodSeconds"] > args.replicas.graceful_shutdown_timeout_s


def test_paths_of_the_settings_are_mounted(service: Json, args: AppArgs) -> None:
    spec = pods(service)["replicas"]["spec"]
    (container,) = spec["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert f"path: {MODEL}\n" in service["spec"]["serveConfigV2"]
    for template in pods(
        service
    ).values():  # Ray Serve builds the application on any node, which looks for the model
        (each,) = template["spec"]["containers"]
        assert str(Path(MODEL).parent) in {mount["mountPath"] for mount in each["volumeMounts"]}
    assert args.cache.disk_path in mounts
    disk_gib = int(volumes[mounts[args.cache.disk_path]]["emptyDir"]["sizeLimit"].removesuffix("Gi"))
    assert args.cache.disk_mib / 1024 < disk_gib


def test_the_log_and_its_password_are_the_ones_that_are_there(service: Json, args: AppArgs) -> None:
    name, statefulset = yaml.safe_load_all((FOLDER / "redis.yaml").read_text())
    settings = args.controller.log_settings()
    assert isinstance(settings, RedisLogSettings)
    assert f"//{name['metadata']['name']}:{name['spec']['ports'][0]['port']}/" in settings.url
    (redis,) = statefulset["spec"]["template"]["spec"]["containers"]
    (password,) = redis["env"]
    for template in pods(service).values():
        environment = {entry["name"]: entry for entry in template["spec"]["containers"][0]["env"]}
        assert environment[REDIS_PASSWORD]["valueFrom"] == password["valueFrom"]
    faults = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert faults["redisPassword"]["valueFrom"] == password["valueFrom"]
    for promise in ("--appendonly yes", "--appendfsync always", "--maxmemory-policy noeviction"):
        assert promise in redis["args"][0]
