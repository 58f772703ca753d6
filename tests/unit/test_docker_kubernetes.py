"""The manifests: valid by Kubernetes' schemas, and in agreement with each other and with the commands they run."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from voltriton import cli, supervisor
from voltriton.doctor import thermal
from voltriton.doctor.command import _parser as doctor_parser

FOLDER = Path(__file__).parents[2] / "docker/kubernetes"
VERSIONS = ("1.28", "1.31", "1.34")
# Of operators and of kustomize: not among Kubernetes' own schemas. The operators' models are on npm.
CUSTOM = {"PodMonitor", "ScaledObject", "Kustomization"}
MODELS = Path(__file__).parent / "kubernetes_models"
NODE = shutil.which("node")
KUBECTL = os.environ.get("KUBECTL") or shutil.which("kubectl")
# Below these come names of the user's own.
FREE = {"matchLabels", "metadata"}
Manifest = dict[str, Any]
needs_models = pytest.mark.skipif(
    NODE is None or not (MODELS / "node_modules").is_dir(),
    reason=f"the operators' models are not installed (npm ci --prefix {MODELS})",
)


def manifests(name: str = "base") -> list[Manifest]:
    found = []
    for path in sorted((FOLDER / name).glob("*.yaml")):
        found += [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]
    return found


def of_kind(kind: str, name: str) -> Manifest:
    (found,) = [m for m in manifests() if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def pod(kind: str, name: str) -> Manifest:
    return of_kind(kind, name)["spec"]["template"]["spec"]


def server_container() -> Manifest:
    return pod("StatefulSet", "voltriton")["containers"][0]


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_schemas(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    checked = [m for m in manifests() + manifests("twelve-boxes") if m["kind"] not in CUSTOM]
    assert len(checked) > 10
    for manifest in checked:
        validator.validate(manifest, version, strict=True)


def faults_of(resources: list[Manifest]) -> list[str]:
    """By the operators' published models: what is wrong with each, empty where nothing is."""
    done = subprocess.run(
        [str(NODE), "check.mjs"],
        cwd=MODELS,
        input=json.dumps(resources),
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def names_in(value: Any) -> set[str]:
    """Field names of a specification, those that are free left out."""
    if isinstance(value, list):
        return {name for item in value for name in names_in(item)}
    if not isinstance(value, dict):
        return set()
    below = {name for key, item in value.items() if key not in FREE for name in names_in(item)}
    return set(value) | below


@needs_models
def test_resources_of_operators_have_the_types_of_their_models() -> None:
    resources = [of_kind("PodMonitor", "voltriton"), of_kind("ScaledObject", "voltriton")]
    assert faults_of(resources) == ["", ""]
    monitor, scaled = copy.deepcopy(resources)
    monitor["spec"]["podMetricsEndpoints"][0]["interval"] = 5
    scaled["spec"]["maxReplicaCount"] = "twelve"
    faults = faults_of([monitor, scaled])
    assert "interval must be string" in faults[0] and "maxReplicaCount must be integer" in faults[1]


@needs_models
def test_resources_of_operators_have_no_unknown_field() -> None:
    """The models let an unknown field pass, and the cluster drops it silently."""
    texts = [path.read_text(encoding="utf-8") for path in (MODELS / "node_modules").rglob("*.d.ts")]
    known = {name for text in texts for name in re.findall(r'"(\w+)"\??:', text)}
    for kind in ("PodMonitor", "ScaledObject"):
        used = names_in(of_kind(kind, "voltriton")["spec"])
        assert len(used) > 5 and used <= known, used - known


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed (or name it: KUBECTL)")
def test_kustomize_makes_the_twelve_boxes() -> None:
    made = {}
    for name in ("base", "twelve-boxes"):
        command = [str(KUBECTL), "kustomize", str(FOLDER / name)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        made[name] = {(m["kind"], m["metadata"]["name"]): m for m in yaml.safe_load_all(text)}
    base, twelve = made["base"], made["twelve-boxes"]
    assert base["StatefulSet", "voltriton"]["spec"]["replicas"] == 1
    assert twelve["StatefulSet", "voltriton"]["spec"]["replicas"] == 12
    assert base.keys() - twelve.keys() == {("ScaledObject", "voltriton")}
    assert twelve.keys() - base.keys() == {("PersistentVolumeClaim", "voltriton-model")}
    (server,) = [
        c
        for c in twelve["StatefulSet", "voltriton"]["spec"]["template"]["spec"]["containers"]
        if c["name"] == "server"
    ]
    assert server["image"] == "registry.example/voltriton:v100"


@pytest.mark.parametrize("name", ["base", "twelve-boxes"])
def test_kustomizations_name_files_that_exist_and_leave_none_out(name: str) -> None:
    kustomization = yaml.safe_load((FOLDER / name / "kustomization.yaml").read_text(encoding="utf-8"))
    for resource in kustomization["resources"]:
        assert (FOLDER / name / resource).exists(), resource
    files = {path.name for path in (FOLDER / name).glob("*.yaml")} - {"kustomization.yaml"}
    assert files == {resource for resource in kustomization["resources"] if not resource.startswith("..")}


def test_the_twelve_boxes() -> None:
    kustomization = yaml.safe_load((FOLDER / "twelve-boxes/kustomization.yaml").read_text(encoding="utf-8"))
    (replicas,) = kustomization["replicas"]
    assert replicas == {"name": of_kind("StatefulSet", "voltriton")["metadata"]["name"], "count": 12}
    assert kustomization["images"][0]["name"] == server_container()["image"].split(":")[0]
    target = kustomization["patches"][0]["target"]
    assert of_kind(target["kind"], target["name"])


def test_one_pod_a_box_with_all_four_cards() -> None:
    spec = pod("StatefulSet", "voltriton")
    assert server_container()["resources"]["limits"]["nvidia.com/gpu"] == "4"
    (term,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert (
        term["labelSelector"]["matchLabels"]
        == of_kind("StatefulSet", "voltriton")["spec"]["selector"]["matchLabels"]
    )


def test_commands_are_ours_and_their_options_exist() -> None:
    container = server_container()
    assert container["args"][0] == "serve"
    options = supervisor.parse(container["args"][1:])
    assert options.address == "0.0.0.0"
    assert (options.http_port, options.grpc_port, options.metrics_port) == tuple(
        p["containerPort"] for p in container["ports"]
    )
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["exec"]["command"] == ["voltriton", "status"]
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:2] == ["voltriton", "drain"] and {"drain", "status"} <= cli.COMMANDS.keys()
    (doctor,) = pod("StatefulSet", "voltriton")["initContainers"]
    assert doctor["args"][0] == "doctor"
    assert doctor_parser().parse_args(doctor["args"][1:]).target == "v100"


def test_open_requests_have_time_to_end() -> None:
    container, spec = server_container(), pod("StatefulSet", "voltriton")
    drain_s = float(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    grace_s = supervisor.parse(container["args"][1:]).grace_s
    assert spec["terminationGracePeriodSeconds"] >= drain_s + grace_s + 15
    envoy = pod("Deployment", "voltriton-proxy")
    assert envoy["terminationGracePeriodSeconds"] > float(envoy["containers"][0]["args"][-1])


def test_start_may_take_as_long_as_the_server_allows() -> None:
    probe = server_container()["startupProbe"]
    assert (
        probe["periodSeconds"] * probe["failureThreshold"]
        >= supervisor.parse(server_container()["args"][1:]).ready_timeout_s
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [("StatefulSet", "voltriton"), ("Deployment", "voltriton-proxy"), ("Deployment", "voltriton-openai")],
)
def test_pods_have_no_more_rights_than_they_need(kind: str, name: str) -> None:
    spec = pod(kind, name)
    assert spec["securityContext"]["runAsNonRoot"] and spec["automountServiceAccountToken"] is False
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"], container["name"]
        assert ":" in container["image"] and not container["image"].endswith(":latest")


def test_selectors_meet_labels_and_ports_meet_names() -> None:
    templates = [m["spec"]["template"] for m in manifests() if m["kind"] in ("StatefulSet", "Deployment")]
    for service in (m for m in manifests() if m["kind"] == "Service"):
        (template,) = [
            t for t in templates if t["metadata"]["labels"].items() >= service["spec"]["selector"].items()
        ]
        names = {port["name"] for container in template["spec"]["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    monitor = of_kind("PodMonitor", "voltriton")["spec"]
    ports = {p["name"] for c in pod("StatefulSet", "voltriton")["containers"] for p in c["ports"]}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports
    assert monitor["selector"] == of_kind("StatefulSet", "voltriton")["spec"]["selector"]


def test_network_policies_cover_every_pod_and_keep_metrics_apart() -> None:
    policies = {
        m["spec"]["podSelector"]["matchLabels"]["app"]: m["spec"]
        for m in manifests()
        if m["kind"] == "NetworkPolicy"
    }
    apps = {
        m["spec"]["selector"]["matchLabels"]["app"]
        for m in manifests()
        if m["kind"] in ("StatefulSet", "Deployment")
    }
    assert policies.keys() == apps
    requests, scrapes = policies["voltriton"]["ingress"]
    assert {port["port"] for port in requests["ports"]} == {8000, 8001}
    assert {port["port"] for port in scrapes["ports"]} == {8002, thermal.PORT}


def test_the_proxy_gives_each_request_to_the_least_busy_box() -> None:
    config = yaml.safe_load(of_kind("ConfigMap", "voltriton-proxy")["data"]["envoy.yaml"])
    clusters = config["static_resources"]["clusters"]
    headless = of_kind("Service", "voltriton-pods")
    assert headless["spec"]["clusterIP"] == "None"
    for cluster in clusters:
        assert cluster["lb_policy"] == "LEAST_REQUEST" and cluster["type"] == "STRICT_DNS"
        (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        address = endpoint["endpoint"]["address"]["socket_address"]
        assert address["address"] == headless["metadata"]["name"]
        assert address["port_value"] in {port["port"] for port in headless["spec"]["ports"]}
    names = {cluster["name"] for cluster in clusters}
    for listener in config["static_resources"]["listeners"]:
        (found,) = listener["filter_chains"][0]["filters"]
        routes = found["typed_config"]["route_config"]["virtual_hosts"][0]["routes"]
        assert {route["route"]["cluster"] for route in routes} <= names


def test_scaling_goes_by_the_queue() -> None:
    scaled = of_kind("ScaledObject", "voltriton")["spec"]
    assert scaled["scaleTargetRef"]["name"] == of_kind("StatefulSet", "voltriton")["metadata"]["name"]
    assert scaled["minReplicaCount"] >= 1
    (trigger,) = scaled["triggers"]
    assert "vllm:num_requests_waiting" in trigger["metadata"]["query"]


def test_keys_are_a_secret_that_is_not_here() -> None:
    assert not [m for m in manifests() if m["kind"] == "Secret"]
    (volume,) = pod("Deployment", "voltriton-openai")["volumes"]
    assert volume["secret"]["secretName"] == "voltriton-keys"
