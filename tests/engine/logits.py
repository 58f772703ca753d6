"""Logits and greedy tokens of checkpoints: by vLLM, and by Hugging Face as the reference.

usage: logits.py vllm|hf OUT.pt JSON MODEL...     JSON: engine arguments (vllm only)
Writes a list, one entry a model: {"logits": [positions, vocabulary] of the prompts, "tokens": [prompts, new tokens],
"steps": [prompts, new tokens, vocabulary], what each new token was chosen from, "corrupted": requests that vLLM counted as
such (with disable_log_stats false)}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

PROMPTS = [
    "hello world",
    "this is a test of the tokenizer, once more with feeling",
    "a b c d e f g",
    "zebra ?",
]
NEW_TOKENS = 24


def vllm(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm import LLM, SamplingParams

    prompts = arguments.pop("prompts", PROMPTS)
    fixed = {"max_model_len": 256, "enforce_eager": True, "max_logprobs": -1, "seed": 0}
    llm = LLM(model, logprobs_mode="raw_logits", enable_prefix_caching=False, **(fixed | arguments))
    wanted = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, prompt_logprobs=-1, logprobs=-1
    )
    answers = llm.generate(prompts, wanted, use_tqdm=False)
    rows = [_row(d) for a in answers for d in a.prompt_logprobs[1:]]
    steps = [[_row(d) for d in a.outputs[0].logprobs] for a in answers]
    return {
        "logits": torch.tensor(rows),
        "tokens": [list(a.outputs[0].token_ids) for a in answers],
        "steps": torch.tensor(steps),
        "corrupted": _corrupted(llm) if arguments.get("disable_log_stats") is False else None,
    }


def _corrupted(llm: Any) -> int:
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:corrupted_requests")


def _row(logprobs: Any) -> list[float]:
    return [logprobs[i].logprob for i in range(len(logprobs))]


def hf(model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    logits, tokens, steps = [], [], []
    with torch.inference_mode():
        for prompt in arguments.get("prompts", PROMPTS):
            ids = tokenizer(prompt)["input_ids"]
            sequence = list(ids)
            for _ in range(NEW_TOKENS):
                rows = network(torch.tensor([sequence])).logits[0].float()
                sequence.append(int(rows[-1].argmax()))
            logits.append(rows[: len(ids) - 1])
            steps.append(rows[len(ids) - 1 :])
            tokens.append(sequence[len(ids) :])
    return {"logits": torch.cat(logits), "tokens": tokens, "steps": torch.stack(steps)}


def main() -> None:
    kind, out, arguments, *models = sys.argv[1:]
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if json.loads(arguments).get("tensor_parallel_size", 1) > 1:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    else:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    run = {"vllm": vllm, "hf": hf}[kind]
    torch.save([run(model, json.loads(arguments)) for model in models], out)


if __name__ == "__main__":
    main()
