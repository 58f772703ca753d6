"""A whole model on one core of this CPU: NVFP4 beside vLLM's bfloat16 and float32 and, if given, llama.cpp.

    OMP_NUM_THREADS=1 taskset -c 1 python tests/bench/cpu_engines.py [--rounds 5]
        [--llama PYTHON GGUF]  a Python with llama-cpp-python, built for this CPU, and a file of the same model

The engines start one after the other; then each is measured in turn while the others wait. A step is the difference
of two generations of different lengths, so prefill is not in it; prefill is the time to the first token of a prompt
of 512. Medians, and the best round in brackets. The engines of vLLM have the settings of the profile `cpu`, but for
the type and the RMS norm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / ".voltriton/models"
PROMPT_TOKENS = 512
SHORT, LONG = 8, 72  # tokens of the two generations
BATCHES = (1, 8)
OURS, VLLMS = "voltriton", "native"  # RMS norm
WAYS = {
    "NVFP4, bfloat16": ("smollm2-nvfp4", "bfloat16", OURS),
    "NVFP4, bfloat16, vLLM's norm": ("smollm2-nvfp4", "bfloat16", VLLMS),
    "NVFP4, float32": ("smollm2-nvfp4", "float32", OURS),
    "vLLM, bfloat16": ("smollm2-hf", "bfloat16", VLLMS),
    "vLLM, float32": ("smollm2-hf", "float32", VLLMS),
}
Generate = Callable[[int, int, int], None]  # sequences, tokens of prompt, new tokens


def vllm_engine(model: str, dtype: str, norm: str) -> Generate:
    from voltriton.settings import load_profile

    profile = load_profile("cpu")
    os.environ |= profile["env"] | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    norms = {name: [norm] for name in ("rms_norm", "fused_add_rms_norm")}
    changed = {"model": model, "dtype": dtype, "ir_op_priority": norms, "enable_prefix_caching": False}
    llm = LLM(**profile["engine"] | changed)

    def generate(sequences: int, prompt: int, new: int) -> None:
        params = SamplingParams(max_tokens=new, ignore_eos=True, temperature=0, detokenize=False)
        prompts: Any = [{"prompt_token_ids": prompt_ids(s, prompt)} for s in range(sequences)]
        llm.generate(prompts, params, use_tqdm=False)

    return generate


class Llama:
    """llama.cpp by its own calls, greedy, with as many sequences at a time as are asked for."""

    def __init__(self, gguf: str) -> None:
        import llama_cpp  # type: ignore[import-not-found]

        self._lib = llama_cpp
        print(llama_cpp.llama_print_system_info().decode(), file=sys.stderr)
        model = llama_cpp.llama_model_load_from_file(gguf.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = 1024 * max(BATCHES), max(BATCHES)
        params.n_batch = params.n_ubatch = PROMPT_TOKENS
        params.n_threads = params.n_threads_batch = int(os.environ["OMP_NUM_THREADS"])
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(PROMPT_TOKENS, 0, 1)

    def generate(self, sequences: int, prompt: int, new: int) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        last = []
        for s in range(sequences):
            ids = prompt_ids(s, prompt)
            last += self._step([(token, i, s, i == prompt - 1) for i, token in enumerate(ids)])
        for position in range(prompt, prompt + new - 1):
            last = self._step([(token, position, s, True) for s, token in enumerate(last)])

    def _step(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """(token, position, sequence, whether the next one is wanted) of each -> the next ones."""
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode: {status}")
        rows = [
            self._lib.llama_get_logits_ith(self._context, i) for i, token in enumerate(tokens) if token[3]
        ]
        return [int(np.ctypeslib.as_array(row, (self._vocabulary,)).argmax()) for row in rows]


def prompt_ids(sequence: int, count: int) -> list[int]:
    return [100 + (7 * i + 31 * sequence) % 40000 for i in range(count)]


def serve(generate: Generate) -> None:
    """Each line [sequences, tokens of prompt, new tokens] on stdin is answered by the seconds it took."""
    for line in sys.stdin:
        begin = time.perf_counter()
        generate(*json.loads(line))
        print("TOOK", time.perf_counter() - begin, flush=True)


class Engine:
    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.seconds(1, 16, 4)

    def seconds(self, *what: int) -> float:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(what) + "\n")
        stdin.flush()
        for line in stdout:
            if line.startswith("TOOK "):
                return float(line.split()[1])
        raise SystemExit(f"{self._process.args}: ended with status {self._process.wait()}")

    def stop(self) -> None:
        self._process.communicate(timeout=60)


def measure(engine: Engine) -> dict[str, float]:
    """Tokens a second."""
    row = {"prefill": PROMPT_TOKENS / engine.seconds(1, PROMPT_TOKENS, 1)}
    for batch in BATCHES:
        step = engine.seconds(batch, 16, LONG) - engine.seconds(batch, 16, SHORT)
        row[f"batch {batch}"] = batch * (LONG - SHORT) / step
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama", nargs=2, metavar=("PYTHON", "GGUF"))
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(vllm_engine(*args.worker) if len(args.worker) == 3 else Llama(*args.worker).generate)
        return
    commands = {
        way: [sys.executable, __file__, "--worker", str(MODELS / model), dtype, norm]
        for way, (model, dtype, norm) in WAYS.items()
    }
    if args.llama:
        python, gguf = args.llama
        commands[f"llama.cpp, {Path(gguf).stem}"] = [python, __file__, "--worker", gguf]
    engines = {way: Engine(command) for way, command in commands.items()}
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in engines}
    for _ in range(args.rounds):
        for way, engine in engines.items():
            rows[way].append(measure(engine))
    for engine in engines.values():
        engine.stop()
    report(rows)


def report(rows: dict[str, list[dict[str, float]]]) -> None:
    names = list(next(iter(rows.values()))[0])
    print(
        f"threads {os.environ.get('OMP_NUM_THREADS')}, load {os.getloadavg()[0]:.1f}; tokens/s: median [best]"
    )
    for way, values in rows.items():
        columns = (
            f"{name} {statistics.median(v[name] for v in values):7.1f} [{max(v[name] for v in values):.1f}]"
            for name in names
        )
        print(f"{way:45} " + "   ".join(columns), flush=True)


if __name__ == "__main__":
    main()
