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


def bars(values: list[tuple[str, float]], width: int = 1000, height: int = 220) -> str:
    """A bar chart; the name and value of a bar show when the pointer is on it."""
    top = max((v for _, v in values if v != float("inf")), default=1.0) or 1.0
    step = width / max(len(values), 1)
    bodies = []
    for i, (name, value) in enumerate(values):
        tall = height * min(value, top) / top
        place = f'x="{i * step:.2f}" y="{height - tall:.2f}" width="{step * 0.9:.2f}" height="{tall:.2f}"'
        bodies.append(f'<rect {place} fill="#4477aa"><title>{html.escape(name)}: {value:.3f}</title></rect>')
    scale = f'<text x="2" y="12" font-size="12">{top:.3g}</text>'
    return (
        f'<svg viewBox="0 0 {width} {height}" width="100%" height="{height}">{"".join(bodies)}{scale}</svg>'
    )
