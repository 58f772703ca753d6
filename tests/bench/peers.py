"""Make an NVFP4 weight-only checkpoint with another tool's defaults: `peers.py llm-compressor|modelopt SRC OUT`.

Run with the tool on PYTHONPATH (docs/quality.md); used by convert_speed.py and quality_table.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"


def llm_compressor(source: Path, out: Path) -> None:
    from llmcompressor import model_free_ptq

    ignore = ["lm_head", "re:.*embed_tokens$"]
    workers = len(os.sched_getaffinity(0))
    model_free_ptq(source, out, scheme="NVFP4A16", ignore=ignore, max_workers=workers, device="cpu")


def modelopt(source: Path, out: Path) -> None:
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    mtq.quantize(model, mtq.W4A16_NVFP4_CFG)
    export_hf_checkpoint(model, export_dir=out)


if __name__ == "__main__":
    {"llm-compressor": llm_compressor, "modelopt": modelopt}[sys.argv[1]](
        Path(sys.argv[2]), Path(sys.argv[3])
    )
