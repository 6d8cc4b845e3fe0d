"""What a RayService may contain as far as KubeRay defines it: the fields of its v1 API, as of KubeRay 1.5.1 to 1.6 (API
reference, RayService and RayCluster). Types of Kubernetes inside it are left to Kubernetes' own schema."""

from __future__ import annotations

from typing import Any

ANY: dict[str, Any] = {}
TEXT = {"type": "string"}
FLAG = {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def record(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


CREDENTIAL = record(value=TEXT, valueFrom=ANY)
AUTOSCALER = record(
    resources=ANY,
    image=TEXT,
    imagePullPolicy=TEXT,
    env=ANY,
    envFrom=ANY,
    volumeMounts=ANY,
    securityContext=ANY,
    idleTimeoutSeconds=COUNT,
    upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    version={"enum": ["v1", "v2"]},
)
HEAD = record(
    ("rayStartParams", "template"),
    serviceType=TEXT,
    headService=ANY,
    enableIngress=FLAG,
    rayStartParams=TEXTS,
    template=ANY,
)
WORKERS = record(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    groupName=TEXT,
    suspend=FLAG,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    idleTimeoutSeconds=COUNT,
    numOfHosts=COUNT,
    rayStartParams=TEXTS,
    template=ANY,
    scaleStrategy=ANY,
)
CLUSTER = record(
    ("headGroupSpec",),
    suspend=FLAG,
    authOptions=record(mode={"enum": ["disabled", "token"]}, secretName=TEXT, enableK8sTokenAuth=FLAG),
    managedBy=TEXT,
    autoscalerOptions=AUTOSCALER,
    headServiceAnnotations=TEXTS,
    enableInTreeAutoscaling=FLAG,
    gcsFaultToleranceOptions=record(
        ("redisAddress",),
        redisUsername=CREDENTIAL,
        redisPassword=CREDENTIAL,
        externalStorageNamespace=TEXT,
        redisAddress=TEXT,
    ),
    headGroupSpec=HEAD,
    rayVersion=TEXT,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
RAY_SERVICE = record(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=record(("name",), name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS),
    spec=record(
        ("serveConfigV2", "rayClusterConfig"),
        rayClusterDeletionDelaySeconds=COUNT,
        serveService=ANY,
        upgradeStrategy=record(
            type={"enum": ["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]},
            clusterUpgradeOptions=ANY,
        ),
        serveConfigV2=TEXT,
        rayClusterConfig=CLUSTER,
        excludeHeadPodFromServeSvc=FLAG,
    ),
)
