"""The result of `voltriton verify` as text, JSON and one HTML page with plots (inline SVG, no scripts)."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field
from typing import Any

from voltriton.checkpoint.comparison import LayerError, Quality
from voltriton.checkpoint.inspection import Check, Parallel


@dataclass
class Report:
    checkpoint: str
    source: str | None
    checks: list[Check] = field(default_factory=list)
    parallel: list[Parallel] = field(default_factory=list)
    layers: list[LayerError] = field(default_factory=list)
    quality: Quality | None = None
    texts: list[str] = field(default_factory=list)
    chat: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        return [f"{c.name}: {c.fault}" for c in self.checks if c.fault]

    def as_json(self) -> dict[str, Any]:
        return {"ok": not self.faults, **asdict(self)}

    def as_text(self) -> str:
        return "\n".join([*self._check_lines(), *self._layer_lines(), *self._quality_lines(), *self._end()])

    def _check_lines(self) -> list[str]:
        lines = [f"{'FAIL' if c.fault else 'ok':4}  {c.name}: {c.fault or c.note}" for c in self.checks]
        for p in self.parallel:
            lines.append(
                f"{'no' if p.fault else 'ok':4}  tensor parallel {p.ranks}{': ' if p.fault else ''}{p.fault}"
            )
        return lines

    def _layer_lines(self, worst: int = 5) -> list[str]:
        if not self.layers:
            return []
        mean = sum(e.relative for e in self.layers) / len(self.layers)
        lines = [
            "",
            f"weight error against {self.source}: mean {mean:.4f}; the worst of {len(self.layers)} matrices:",
        ]
        for e in sorted(self.layers, key=lambda e: -e.relative)[:worst]:
            worst_block = f"worst block {e.worst_block:.3f} (row {e.worst_row}, column {e.worst_column})"
            lines.append(f"  {e.module}: relative {e.relative:.4f}, SNR {e.snr_db:.1f} dB, {worst_block}")
        return lines

    def _quality_lines(self) -> list[str]:
        q = self.quality
        if q is None:
            return []
        return [
            "",
            f"on {q.tokens} tokens of {', '.join(self.texts)}:",
            f"  perplexity {q.perplexity:.3f}, source {q.source_perplexity:.3f} ({q.increase:+.1%})",
            f"  KL divergence {q.kl:.4f} nats, same most likely token {q.agreement:.1%}",
        ]

    def _end(self) -> list[str]:
        lines = [f"chat: {question!r} -> {answer!r}" for question, answer in self.chat]
        return [*([""] if lines or self.notes else []), *lines, *self.notes]

    def as_html(self) -> str:
        title = f"NVFP4 checkpoint {html.escape(self.checkpoint)}"
        parts = [f"<h1>{title}</h1>", f"<pre>{html.escape(self.as_text())}</pre>"]
        if self.layers:
            snr = [(e.module, e.snr_db) for e in self.layers]
            worst = [(e.module, e.worst_block) for e in self.layers]
            parts += ["<h2>Signal-to-noise ratio by matrix, dB</h2>", bars(snr)]
            parts += ["<h2>Relative error of the worst block by matrix</h2>", bars(worst)]
        style = (
            "body{font-family:sans-serif;margin:2em}pre{background:#f4f4f4;padding:1em;white-space:pre-wrap}"
        )
        head = f'<meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n"


KINDS = {"q_proj": "#4477aa", "k_proj": "#66ccee", "v_proj": "#228833", "o_proj": "#ccbb44"}
KINDS |= {"gate_proj": "#ee6677", "up_proj": "#aa3377", "down_proj": "#000000"}  # Paul Tol's bright colours
OTHER = "#bbbbbb"
MARGIN = 40


def bars(values: list[tuple[str, float]], width: int = 1000, height: int = 220) -> str:
    """A bar chart of matrices, coloured by kind; the name and value of a bar show when the pointer is on it."""
    top = max((v for _, v in values if v != float("inf")), default=1.0) or 1.0
    step = (width - MARGIN) / max(len(values), 1)
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = height * (1 - share) + 10
        line = f'x1="{MARGIN}" y1="{y:.1f}" x2="{width}" y2="{y:.1f}" stroke="#cccccc"'
        parts.append(f'<line {line}/><text x="0" y="{y + 4:.1f}" font-size="11">{top * share:.3g}</text>')
    for i, (name, value) in enumerate(values):
        tall = height * min(value, top) / top
        place = f'x="{MARGIN + i * step:.2f}" y="{height - tall + 10:.2f}" width="{step * 0.9:.2f}" height="{tall:.2f}"'
        title = f"<title>{html.escape(name)}: {value:.3f}</title>"
        parts.append(f'<rect {place} fill="{_colour(name)}">{title}</rect>')
    kinds = dict.fromkeys(name.rpartition(".")[2] for name, _ in values)
    key = "".join(f' <span style="color:{_colour(k)}">&#9632; {html.escape(k)}</span>' for k in kinds)
    return f'<svg viewBox="0 0 {width} {height + 20}" width="100%">{"".join(parts)}</svg><p>{key}</p>'


def _colour(name: str) -> str:
    return KINDS.get(name.rpartition(".")[2], OTHER)
