"""Writes dashboards/voltriton.json: `python docker/grafana/make_dashboard.py`. A test compares the file with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "dashboards" / "voltriton.json"
WIDTH, HEIGHT = 8, 8
MODEL = 'model=~"$model",instance=~"$instance"'
CARD = 'instance=~".*"'
Query = tuple[str, str]


def quantiles(metric: str) -> list[Query]:
    inner = f"sum by (le) (rate({metric}_bucket{{{MODEL}}}[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {inner})", f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99)]


def rate(metric: str, legend: str, extra: str = "", by: str = "") -> Query:
    group = f"sum by ({by}) " if by else "sum "
    return f"{group}(rate({metric}{{{MODEL}{extra}}}[$__rate_interval]))", legend


# Row -> panels of (title, unit, queries as (expression, legend), what it tells).
ROWS: dict[str, list[tuple[str, str, list[Query], str]]] = {
    "Latency": [
        (
            "Time to first token",
            "s",
            quantiles("vllm:time_to_first_token_seconds"),
            "Queue, prefill and one step.",
        ),
        (
            "Between tokens",
            "s",
            quantiles("vllm:inter_token_latency_seconds"),
            "What a reader sees as speed.",
        ),
        (
            "Whole request",
            "s",
            quantiles("vllm:e2e_request_latency_seconds"),
            "Depends on how long answers are.",
        ),
        (
            "In the queue",
            "s",
            quantiles("vllm:request_queue_time_seconds"),
            "Grows first when the box is too small.",
        ),
        ("Prefill", "s", quantiles("vllm:request_prefill_time_seconds"), "Grows with prompt length."),
    ],
    "Load": [
        (
            "Tokens",
            "short",
            [
                rate("vllm:generation_tokens_total", "generated/s"),
                rate("vllm:prompt_tokens_total", "prompt/s"),
            ],
            "",
        ),
        (
            "Requests in the engine",
            "short",
            [
                (f"sum (vllm:num_requests_running{{{MODEL}}})", "running"),
                (f"sum (vllm:num_requests_waiting{{{MODEL}}})", "waiting"),
            ],
            "",
        ),
        (
            "KV cache in use",
            "percentunit",
            [(f"vllm:kv_cache_usage_perc{{{MODEL}}}", "{{instance}} {{model}}")],
            "Full: sequences are preempted.",
        ),
        (
            "Prompt tokens from the prefix cache",
            "percentunit",
            [
                (
                    f"sum (rate(vllm:prefix_cache_hits_total{{{MODEL}}}[$__rate_interval])) / "
                    f"sum (rate(vllm:prefix_cache_queries_total{{{MODEL}}}[$__rate_interval]))",
                    "hits",
                )
            ],
            "",
        ),
    ],
    "Outcomes": [
        ("Requests by outcome", "reqps", [rate("voltriton:requests_total", "{{outcome}}", by="outcome")], ""),
        (
            "Engine up",
            "short",
            [(f"voltriton:engine_up{{{MODEL}}}", "{{instance}} {{model}}")],
            "0: down or being started again.",
        ),
        (
            "Engine restarts",
            "short",
            [(f"increase(voltriton:engine_restarts_total{{{MODEL}}}[1h])", "{{instance}} {{model}}")],
            "In the last hour.",
        ),
    ],
    "Cards": [
        (
            "Temperature",
            "celsius",
            [(f"voltriton_gpu_temperature_celsius{{{CARD}}}", "{{instance}} GPU {{gpu}}")],
            "V100 slows at about 90.",
        ),
        ("Power", "watt", [(f"voltriton_gpu_power_watts{{{CARD}}}", "{{instance}} GPU {{gpu}}")], ""),
        (
            "SM clock",
            "hertz",
            [(f'voltriton_gpu_clock_hertz{{{CARD},clock="sm"}}', "{{instance}} GPU {{gpu}}")],
            "",
        ),
        (
            "Holding back",
            "short",
            [(f"voltriton_gpu_throttled{{{CARD}}} > 0", "{{instance}} GPU {{gpu}} {{reason}}")],
            "sw_power_cap: the limit at work.",
        ),
        (
            "Xid errors",
            "short",
            [(f"voltriton_gpu_xid_errors_total{{{CARD}}}", "{{instance}} GPU {{gpu}} Xid {{xid}}")],
            "Since the sampler started.",
        ),
        (
            "Memory in use",
            "bytes",
            [(f"voltriton_gpu_memory_used_bytes{{{CARD}}}", "{{instance}} GPU {{gpu}}")],
            "",
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    return {
        "uid": "voltriton",
        "title": "voltriton",
        "tags": ["voltriton"],
        "timezone": "browser",
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [variable("model"), variable("instance")]},
        "panels": panels(),
    }


def variable(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "query": f"label_values(voltriton:engine_up, {name})",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    top = 0
    for row, entries in ROWS.items():
        made.append(
            {"id": len(made) + 1, "type": "row", "title": row, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}}
        )
        for index, (title, unit, queries, text) in enumerate(entries):
            place = {"x": WIDTH * (index % 3), "y": top + 1 + HEIGHT * (index // 3), "w": WIDTH, "h": HEIGHT}
            made.append(panel(len(made) + 1, title, unit, queries, text, place))
        top += 1 + HEIGHT * -(-len(entries) // 3)
    return made


def panel(
    number: int, title: str, unit: str, queries: list[Query], text: str, place: dict[str, int]
) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "description": text,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(65 + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(queries)
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(text(), encoding="utf-8")
