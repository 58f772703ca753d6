"""With `--deep`: data really moved between the cards. Without it one row says that it was not tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from voltriton.doctor.box import Box
from voltriton.doctor.rows import FAIL, OK, SKIP, Row, check

LIMIT_S = 300.0


@check("deep.transfers", 27, 28, 29, 30, 31, 32, 33, 37)
def transfers(box: Box) -> Row:
    need = "equal data after copies and all-reduces, plain and from a graph"
    if not box.options.deep:
        return Row("deep.transfers", SKIP, "not asked for (--deep)", need)
    if box.target == "cpu":
        return Row("deep.transfers", SKIP, "no card", need)
    if len(box.gpus) == 1:
        return Row("deep.transfers", OK, "one card", "nothing to move")
    probe = str(Path(__file__).with_name("deep_probe.py"))
    output = box.host.run("deep-probe", [box.options.python, "-P", probe], LIMIT_S)
    if output.missing:
        return Row(
            "deep.transfers", SKIP, f"{box.options.python} cannot be run, or is not in the recording", need
        )
    lines = [line for text in output.out.splitlines() if (line := _line(text))]
    results = [line for line in lines if "test" in line]
    bad = [f"{line['test']}: {line['detail']}" for line in results if not line["ok"]]
    fix = "rows link.acs and link.iommu; to go on without P2P set NCCL_P2P_DISABLE=1 (slower)"
    if output.code is None:
        begun = next((line["begin"] for line in reversed(lines) if "begin" in line), "the start")
        return Row("deep.transfers", FAIL, f"hung at {begun}: {output.err}", need, "P2P is broken here", fix)
    if bad or not output.ok or not results:
        said = "; ".join(bad[:3]) or (output.err.strip() or "no result").splitlines()[-1]
        return Row("deep.transfers", FAIL, said, need, "the model would compute with wrong data", fix)
    return Row("deep.transfers", OK, f"{len(results)} tests", need)


def _line(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
