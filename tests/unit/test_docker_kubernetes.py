"""The manifests: valid by Kubernetes' schemas, and in agreement with each other and with the commands they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from voltriton import cli, supervisor
from voltriton.doctor import thermal
from voltriton.doctor.command import _parser as doctor_parser

FOLDER = Path(__file__).parents[2] / "docker/kubernetes"
VERSIONS = ("1.28", "1.31", "1.34")
# Of operators, without schemas in any package that could be had: their fields are looked at by the tests below.
CUSTOM = {"PodMonitor", "ScaledObject", "Kustomization"}
Manifest = dict[str, Any]


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
