"""Schemas of the custom resources of deploy/: the fields that it uses, as their operators document them.

kubernetes-validate knows Kubernetes' own kinds only. These are no copies of the operators' schemas: they
refuse a misspelt field, not one that an operator has come to refuse.
"""

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "minLength": 1}
INTEGER: Schema = {"type": "integer", "minimum": 0}
SELECTOR: Schema = {
    "type": "object",
    "required": ["matchLabels"],
    "properties": {"matchLabels": {"type": "object", "minProperties": 1, "additionalProperties": STRING}},
    "additionalProperties": False,
}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


def _kind(version: str, kind: str, spec: Schema) -> Schema:
    metadata = _object(
        {"name": STRING, "namespace": STRING},
        {"labels": {"type": "object"}, "annotations": {"type": "object"}},
    )
    fixed = {"apiVersion": {"const": version}, "kind": {"const": kind}}
    return _object({**fixed, "metadata": metadata, "spec": spec})


DURATION: Schema = {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"}
BEHAVIOR = _object(
    {
        "stabilizationWindowSeconds": INTEGER,
        "policies": _list(
            _object({"type": {"enum": ["Pods", "Percent"]}, "value": INTEGER, "periodSeconds": INTEGER})
        ),
    }
)
RULE = _object(
    {
        "alert": {"type": "string", "pattern": "^Tokentape[A-Za-z]+$"},
        "expr": STRING,
        "labels": _object({"severity": {"enum": ["critical", "warning"]}}),
        "annotations": _object(
            {"summary": STRING, "runbook_url": {"type": "string", "pattern": r"^https://[^#]+#\w+$"}}
        ),
    },
    {"for": DURATION},
)
REDIS = _object(
    {"listName": STRING, "listLength": {"type": "string", "pattern": r"^\d+$"}},
    {"enableTLS": {"enum": ["true", "false"]}, "databaseIndex": {"type": "string", "pattern": r"^\d+$"}},
)
TRIGGER = _object(
    {
        "type": {"const": "redis"},
        "metricType": {"const": "AverageValue"},  # `fallback` takes no other
        "metadata": REDIS,
        "authenticationRef": _object({"name": STRING}),
    }
)

SCHEMAS: dict[str, Schema] = {
    "PodMonitor": _kind(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        _object(
            {
                "selector": SELECTOR,
                "podMetricsEndpoints": _list(_object({"port": STRING, "path": STRING, "interval": DURATION})),
            }
        ),
    ),
    "PrometheusRule": _kind(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        _object({"groups": _list(_object({"name": STRING, "rules": _list(RULE)}))}),
    ),
    "ScaledObject": _kind(
        "keda.sh/v1alpha1",
        "ScaledObject",
        _object(
            {
                "scaleTargetRef": _object({"name": STRING}),
                "minReplicaCount": INTEGER,
                "maxReplicaCount": INTEGER,
                "triggers": _list(TRIGGER),
            },
            {
                "pollingInterval": INTEGER,
                "fallback": _object({"failureThreshold": INTEGER, "replicas": INTEGER}),
                "advanced": _object(
                    {"horizontalPodAutoscalerConfig": _object({"behavior": _object({"scaleDown": BEHAVIOR})})}
                ),
            },
        ),
    ),
    "TriggerAuthentication": _kind(
        "keda.sh/v1alpha1",
        "TriggerAuthentication",
        _object({"secretTargetRef": _list(_object({"parameter": STRING, "name": STRING, "key": STRING}))}),
    ),
}
