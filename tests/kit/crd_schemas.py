"""JSON schemas of the kinds that KEDA and the Prometheus operator define, as far as the chart uses them.

A field that the chart begins to use is added here, as the kind's definition has it: KEDA's ScaledObject
(keda.sh/v1alpha1) and the operator's ServiceMonitor (monitoring.coreos.com/v1, operator 0.84).
"""

from typing import Any

COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string"}
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
INTERVAL = {"type": "string", "pattern": r"^(\d+h)?(\d+m)?(\d+s)?(\d+ms)?$", "minLength": 2}


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


METADATA = closed("name", name=TEXT, namespace=TEXT, labels=LABELS, annotations=LABELS)
WINDOW = closed(stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600})
SPECS = {
    ("keda.sh/v1alpha1", "ScaledObject"): closed(
        "scaleTargetRef triggers",
        scaleTargetRef=closed("name", name=TEXT, apiVersion=TEXT, kind=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        pollingInterval=COUNT,
        fallback=closed(
            "failureThreshold replicas",
            failureThreshold=COUNT,
            replicas=COUNT,
            behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
        ),
        advanced=closed(
            horizontalPodAutoscalerConfig=closed(behavior=closed(scaleDown=WINDOW, scaleUp=WINDOW)),
        ),
        triggers={"type": "array", "minItems": 1, "items": closed("type metadata", type=TEXT, metadata=LABELS)},
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): closed(
        "selector endpoints",
        selector=closed(matchLabels=LABELS),
        endpoints={
            "type": "array",
            "minItems": 1,
            "items": closed(port=TEXT, interval=INTERVAL, honorLabels={"type": "boolean"}),
        },
    ),
}
SCHEMAS = {
    f"{version} {kind}": closed(
        "apiVersion kind metadata spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=spec
    )
    for (version, kind), spec in SPECS.items()
}
"""By apiVersion and kind."""
