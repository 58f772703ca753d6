"""A result as files: NAME.json with everything, and NAME.html that shows it offline."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from voltriton_perf.svg import Series, plot

METRICS = (("ttft_ms", "Time to first token"), ("itl_ms", "Inter-token latency"), ("e2e_ms", "End to end"))
# More curves than this in one plot cannot be told apart: the highest loads are shown.
MOST_CURVES = 6
PLOT_STYLE = """
svg text{font-family:system-ui,sans-serif;fill:#333}
.title{font-size:14px;font-weight:600}.axis{font-size:12px}.tick{font-size:11px}.grid{stroke:#e8e8e8}
"""
STYLE = (
    PLOT_STYLE
    + """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1180px;padding:0 1em;color:#1a1a1a;background:#fff}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}
table{border-collapse:collapse;margin:.6em 0}th,td{padding:.25em .7em;text-align:right;border-bottom:1px solid #ddd}
th:first-child,td:first-child{text-align:left}.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1em}
svg{width:100%;height:auto;border:1px solid #e5e5e5;border-radius:6px}
.bad{color:#a40000;font-weight:600}.good{color:#006b3c;font-weight:600}pre{background:#f6f6f6;padding:.8em;overflow:auto}
"""
)


class ResultError(Exception):
    """A file is no result of ours, or none can be written there: one line."""


def check_place(folder: Path, name: str) -> None:
    """ResultError where `write` would fail: it is known before hours are spent on measuring."""
    if Path(name).name != name:
        raise ResultError(f"name: got {name!r}, allowed: a file's name without a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ResultError(f"--out {folder} cannot be written ({error.strerror}): choose another") from None


def write(result: dict[str, Any], folder: Path, name: str) -> Path:
    """Writes both files; returns the JSON's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".html").write_text(html(result), encoding="utf-8")
    return path


def read(path: Path) -> dict[str, Any]:
    """ResultError where it is no result of `voltriton sweep` or `sla`."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ResultError(f"{path}: no JSON: {error}") from None
    if not isinstance(result, dict) or not str(result.get("format", "")).startswith("voltriton-"):
        raise ResultError(f"{path}: no result of voltriton sweep or voltriton sla")
    return result


def html(result: dict[str, Any]) -> str:
    """The page; everything from the result is escaped."""
    title = f"voltriton {result['format'].split('/')[0].removeprefix('voltriton-')}: {result['name']}"
    state = "" if result["complete"] else '<p class="bad">Interrupted: these results are partial.</p>'
    notes = "".join(f"<p>{escape(note)}</p>" for note in result.get("notes", []))
    levels = [level for level in result["levels"] if level.get("summary")]
    body = [
        f"<h1>{escape(title)}</h1>", state, notes, verdicts(result.get("verdicts", [])),
        "<h2>Levels</h2>", level_table(result["levels"]),
        '<h2>Plots</h2><div class="plots">', *plots(levels), "</div>",
        "<h2>Percentiles</h2>", percentile_table(levels),
        "<h2>Errors</h2>", error_table(levels),
        "<h2>The server's side</h2>", server_table(levels),
        "<h2>Set-up</h2>", f"<pre>{escape(json.dumps(result['setup'], indent=1, ensure_ascii=False))}</pre>",
        f"<pre>{escape(json.dumps(result['options'], indent=1, ensure_ascii=False, default=str))}</pre>",
    ]  # fmt: skip
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    head += f"<style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    lines = ["<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def name_of(level: dict[str, Any]) -> str:
    return f"{level['mode']} {level['value']:g}"


def level_table(levels: Sequence[dict[str, Any]]) -> str:
    rows = []
    for level in levels:
        summary = level.get("summary")
        marks = [level["failed"] or "", *level.get("notes", []), "partial" if level.get("partial") else ""]
        row: list[object] = [name_of(level), level["tool"]]
        if summary:
            row += [summary["offered_s"], summary["requests_s"], summary["output_tokens_s"]]
            row += [summary[key]["p95"] if summary[key] else "" for key, _ in METRICS]
            row += [f"{summary['failed']} of {summary['requests']}"]
        else:
            row += [""] * 7
        rows.append([*row, level["load_average"], "; ".join(m for m in marks if m)])
    heads = (
        "load",
        "tool",
        "sent/s",
        "requests/s",
        "output tokens/s",
        "TTFT P95 ms",
        "ITL P95 ms",
        "end to end P95 ms",
        "failed",
    )
    return table((*heads, "load average", "notes"), rows)


def percentile_table(levels: Sequence[dict[str, Any]]) -> str:
    rows = []
    for level in levels:
        for key, title in (*METRICS, ("gap_ms", "Gap between messages")):
            if spread := level["summary"][key]:
                rows.append(
                    [
                        name_of(level),
                        f"{title}, ms",
                        *[spread[k] for k in ("mean", "p50", "p90", "p95", "p99", "max")],
                    ]
                )
    return table(("load", "metric", "mean", "P50", "P90", "P95", "P99", "most"), rows)


def error_table(levels: Sequence[dict[str, Any]]) -> str:
    rows = [[name_of(level), cause, n] for level in levels for cause, n in level["summary"]["errors"].items()]
    return table(("load", "cause", "requests"), rows) if rows else "<p>None.</p>"


def server_table(levels: Sequence[dict[str, Any]]) -> str:
    rows = []
    for level in levels:
        for name, value in sorted(level["server"].items()):
            if name != "samples":
                text = f"mean {value['mean']:g}, most {value['max']:g}" if isinstance(value, dict) else value
                rows.append([name_of(level), name, text])
    return table(("load", "what", "value"), rows) if rows else "<p>Not sampled.</p>"


def verdicts(found: Sequence[dict[str, Any]]) -> str:
    if not found:
        return ""
    rows = "".join(
        f"<tr><td>{escape(v['target'])}</td><td>{escape(v['allowed'])}</td><td>{escape(str(v['got']))}</td>"
        f'<td class="{"good" if v["met"] else "bad"}">{"met" if v["met"] else "missed"}</td></tr>'
        for v in found
    )
    return f"<h2>Verdicts</h2><table><tr><th>target</th><th>allowed</th><th>got</th><th>verdict</th></tr>{rows}</table>"


def plots(levels: Sequence[dict[str, Any]]) -> list[str]:
    if not levels:
        return []
    x_title = (
        "streams at a time"
        if levels[0]["mode"] == "concurrency"
        else f"{levels[0]['mode']}, requests a second"
    )
    if levels[0]["mode"] == "users":
        x_title = "users"
    found = [_against_load(levels, key, title, x_title) for key, title in METRICS]
    rate = [(float(v["value"]), v["summary"]["output_tokens_s"]) for v in levels]
    found.append(plot("Throughput", x_title, "output tokens/s", [Series("tokens/s", rate)]))
    found += [_cdf(levels, key, title) for key, title in METRICS]
    return [*found, _timeline(levels[-1]), _server_timeline(levels[-1])]


def _against_load(levels: Sequence[dict[str, Any]], key: str, title: str, x_title: str) -> str:
    series = [
        Series(p.upper(), [(float(v["value"]), v["summary"][key][p]) for v in levels if v["summary"][key]])
        for p in ("p50", "p95", "p99")
    ]
    return plot(f"{title} against load", x_title, "ms", series)


def _cdf(levels: Sequence[dict[str, Any]], key: str, title: str) -> str:
    series = []
    for level in levels[-MOST_CURVES:]:
        values = level.get("quantiles", {}).get(key, [])
        series.append(Series(name_of(level), [(value, q / 100) for q, value in enumerate(values)]))
    return plot(f"{title}: part of the requests within", "ms", "part", series)


def _timeline(level: dict[str, Any]) -> str:
    points = level.get("timeline", [])
    series = [
        Series("end to end", [(at, e2e) for at, _, e2e in points], lines=False),
        Series("TTFT", [(at, ttft) for at, ttft, _ in points], lines=False),
    ]
    return plot(f"Requests over time, {name_of(level)}", "sent at, s", "ms", series)


def _server_timeline(level: dict[str, Any]) -> str:
    samples = level["server"].get("samples", [])
    series = [
        Series(name, [(s["at_s"], s[name]) for s in samples if name in s]) for name in ("running", "waiting")
    ]
    return plot(f"Requests in the engine, {name_of(level)}", "s", "requests", series)
