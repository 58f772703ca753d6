"""Alerts and dashboard: they parse, they fire when they should, and they ask for metrics that exist."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_doctor_thermal import FakeNvml
from voltriton.doctor import thermal
from voltriton.stub import metrics

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "docker/prometheus"
GRAFANA = ROOT / "docker/grafana"
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: prometheus), or name it: PROMTOOL"
)

# vLLM's names that the host passes on (vllm/v1/metrics/loggers.py).
VLLM = {
    "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket", "vllm:request_prefill_time_seconds_bucket", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:corrupted_requests_total",
}  # fmt: skip
OUTCOMES = {"stop", "length", "cancelled", "deadline", "refused", "unavailable", "failed"}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "rules.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    board = json.loads((GRAFANA / "dashboards/voltriton.json").read_text(encoding="utf-8"))
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [rule["expr"] for rule in rules()] + [
        target["expr"] for panel in panels() for target in panel["targets"]
    ]


def known_metrics() -> set[str]:
    nvml = FakeNvml()
    cards = thermal.Cards(nvml)
    cards._count_xid(0, 79)
    of_cards = {sample.name for family in cards.collect() for sample in family.samples}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    return VLLM | {metrics.OUTCOMES, metrics.RESTARTS, metrics.ENGINE_UP} | of_cards | recorded


def test_every_metric_that_is_asked_for_exists() -> None:
    asked = {
        name
        for expression in expressions()
        for name in re.findall(r"\b(?:vllm|voltriton)[:_][a-z0-9_:]+", expression)
    }
    assert asked and asked <= known_metrics()
    assert VLLM - asked == set(), "the dashboard leaves out one that it should show"


def test_every_outcome_that_is_asked_for_exists() -> None:
    for expression in expressions():
        for _, words in re.findall(r'outcome(=~|!=|=)"([^"]+)"', expression):
            assert set(words.split("|")) <= OUTCOMES


def test_vllm_has_these_metrics() -> None:
    source = importlib.util.find_spec("vllm")
    if source is None or source.origin is None:
        pytest.skip("vLLM is not installed")
    text = (Path(source.origin).parent / "v1/metrics/loggers.py").read_text(encoding="utf-8")
    for name in VLLM:
        assert f'"{name.removesuffix("_bucket").removesuffix("_total")}' in text, name


@needs_promtool
def test_promtool_accepts_configuration_and_rules() -> None:
    for argv in (["check", "config", "--syntax-only", "prometheus.yaml"], ["check", "rules", "rules.yaml"]):
        done = subprocess.run(
            [str(PROMTOOL), *argv], cwd=PROMETHEUS, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "rules_test.yaml"],
        cwd=PROMETHEUS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_panels_have_queries_that_parse(tmp_path: Path) -> None:
    filled = [
        {"record": f"panel:{index}", "expr": expression.replace("$__rate_interval", "1m")}
        for index, expression in enumerate(expressions())
    ]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": filled}]}), encoding="utf-8")
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_what_its_program_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboard", GRAFANA / "make_dashboard.py")
    assert spec and spec.loader
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert (GRAFANA / "dashboards/voltriton.json").read_text(encoding="utf-8") == program.text()


def test_grafanas_own_schema_knows_every_field_of_the_dashboard() -> None:
    """Grafana's published types drop what they do not know; nothing of ours is lost in them, a slip would be."""
    dashboard = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard", reason="grafana-foundation-sdk"
    )
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    plugins.register_default_plugins()

    def through(board: dict[str, Any]) -> Any:
        return json.loads(JSONEncoder().encode(dashboard.Dashboard.from_json(board)))

    board = json.loads((GRAFANA / "dashboards/voltriton.json").read_text(encoding="utf-8"))
    assert lost(board, through(board)) == []
    first = next(panel for panel in board["panels"] if panel["type"] != "row")
    first["targets"][0]["expresion"] = first["options"]["legendd"] = 1
    assert len(lost(board, through(board))) == 2


def lost(given: Any, kept: Any, where: str = "") -> list[str]:
    """Places of `given` that `kept` has not, or has otherwise."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            place
            for key, value in given.items()
            for place in (lost(value, kept[key], f"{where}.{key}") if key in kept else [f"{where}.{key}"])
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [p for i, value in enumerate(given) for p in lost(value, kept[i], f"{where}[{i}]")]
    return [] if given == kept else [where]


def test_panels_do_not_overlap_and_use_the_provisioned_source() -> None:
    sources = yaml.safe_load(
        (GRAFANA / "provisioning/datasources/prometheus.yaml").read_text(encoding="utf-8")
    )
    uid = sources["datasources"][0]["uid"]
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == uid and panel["targets"]


def test_every_alert_is_in_the_manual() -> None:
    manual = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    sections = {heading.lower() for heading in re.findall(r"^#### (\w+)", manual, re.M)}
    alerts = [rule for rule in rules() if "alert" in rule]
    for rule in alerts:
        name = rule["alert"].lower()
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name}"
        assert rule["labels"]["severity"] in ("page", "ticket")
    assert {rule["alert"].lower() for rule in alerts} == sections


def test_prometheus_asks_the_ports_that_answer() -> None:
    jobs = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text(encoding="utf-8"))["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    assert targets == {"voltriton": ["voltriton:8002"], "thermal": [f"thermal:{thermal.PORT}"]}
