"""The Kubernetes file of docs/clusters.md fits together; skipped where there is no reader for YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"


def test_the_kubernetes_objects_mean_each_other() -> None:
    yaml: Any = pytest.importorskip("yaml")
    service, job, policy = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    name = service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == name
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{name}:29500" in container["args"]
    assert f"--nnodes={job['spec']['completions']}" in container["args"]
    assert {port["port"] for port in service["spec"]["ports"]} == {port["containerPort"] for port in container["ports"]}
    assert pod["spec"]["enableServiceLinks"] is False, "a Service may be called gradwire"
