"""Tokens a second of whole models of random NVFP4 weights: our kernels beside Marlin and vLLM's emulation, in one run.

    python tests/bench/end_to_end.py --out perf/results/end-to-end-h200 [--only MODEL:WAY[@RANKS] ...]
        [--plain-vllm FOLDER]     a vLLM without compiled extensions, for the ways that take a V100's code path

All engines start side by side; then each is measured alone, while the others wait. A step's time is taken from two
generations of different lengths, so prefill is not in it. Decoding runs in CUDA graphs without torch.compile. Writes
OUT.txt (what is printed) and OUT.json.

Ways: `voltriton`, `marlin`, `emulation` differ in the NVFP4 kernels alone (TRITON_ATTN and vLLM's extensions in all);
`volta-attention` is what a V100 runs (capability forced to 7.0, no extensions, our kernels as compute_70 PTX), `volta`
the same with Triton's attention.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "engine"))
from kept import KEPT

PROMPT_TOKENS = 128
LONG_PROMPTS = (512, 4096)  # of one sequence, for the time to the first token
DTYPE = "float16"
QWEN3: dict[str, Any] = {
    "head_dim": 128,
    "num_attention_heads": 32,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
QWEN4_EXP: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "architectures": ["Qwen4ExpForCausalLM"],
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "output_gate_type": "silu",
    "hc_lowrank": 320,
    "ple_layer_ids": [2],
    "ple_embedding_dtype": "float8_e4m3fn",
    "ngram_vocab_size_base": 200_000,  # the published model has 20 million: 51 GB of host memory, the same traffic
    "eos_token_id": 2,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        **QWEN3,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": {
        **QWEN3,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    "Qwen3-32B": {
        **QWEN3,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
    },
    "qwen4_exp": QWEN4_EXP,
}
BATCHES = [1, 8, 32]
SAME_KERNELS: dict[str, Any] = {"attention_backend": "TRITON_ATTN"}
WAYS: dict[str, dict[str, Any]] = {
    way: {"linear_backend": way, "moe_backend": way, **SAME_KERNELS}
    for way in ("voltriton", "marlin", "emulation")
} | {"volta": {}, "volta-attention": {}}
VOLTA = {"VOLTRITON_FORCE_CAPABILITY": "7.0"}
ENVIRONMENT = {
    "volta": VOLTA | {"VOLTRITON_ATTENTION": "triton"},
    "volta-attention": VOLTA | {"VOLTRITON_ATTENTION": "sm70"},
}
DEFAULT = [f"{model}:{way}" for model in ("Qwen3-8B", "Qwen3-30B-A3B") for way in WAYS] + ["qwen4_exp:volta"]


def write_model(folder: Path, model: str, **changes: Any) -> None:
    """A folder with the configuration alone; `changes` of it."""
    kind = MODELS[model]["model_type"].removesuffix("_text")
    kept = ["lm_head", *(f"model.layers.*.{name}" for name in KEPT[kind])]
    quantisation = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": kept,
        "producer": {"name": "random", "version": "0"},
    }
    config = {**MODELS[model], "dtype": "bfloat16", "quantization_config": quantisation, **changes}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))


def register_loader() -> None:
    """`load_format="random_nvfp4"`: every value random, of the size that trained weights have."""
    import torch
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # before modules that ask for operators which the plugin brings
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def fill(name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.uint8:
            tensor.random_(0, 256)
        elif tensor.dtype == torch.float8_e4m3fn and "ngram" not in name:
            tensor.view(torch.uint8).random_(0x30, 0x40)  # 0.5 to 1.9
        elif name.endswith("weight_scale_2"):
            tensor.fill_(0.02 / 3 / 1.1)  # the e2m1 codes have a root mean square of 3
        elif name.endswith("input_scale"):
            tensor.fill_(0.01)
        elif tensor.dtype in (torch.float16, torch.bfloat16):
            tensor.normal_(0, 0.02) if tensor.dim() > 1 else tensor.fill_(0.9)

    @register_model_loader("random_nvfp4")
    class RandomLoader(DummyModelLoader):  # type: ignore[misc, valid-type]
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            torch.manual_seed(0)
            for name, parameter in model.named_parameters():
                fill(name, parameter.data)


def engine_arguments(model: str, way: str, ranks: int = 1) -> dict[str, Any]:
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": BATCHES}
    if model != "qwen4_exp":  # which has graphs of its own kind
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return {
        "dtype": DTYPE,
        "load_format": "random_nvfp4",
        "skip_tokenizer_init": True,
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": max(BATCHES),
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 2 << 30,
        "enable_prefix_caching": False,
        "seed": 0,
        "tensor_parallel_size": ranks,
        "compilation_config": compilation,
        **WAYS[way],
    }


def prompts(batch: int, length: int) -> list[dict[str, Any]]:
    return [
        {"prompt_token_ids": [(7 + 31 * i + 17 * j) % 50_000 for j in range(length)]} for i in range(batch)
    ]


def generate(llm: Any, batch: int, tokens: int, length: int) -> list[Any]:
    """vLLM's answers, `tokens` new tokens each, to prompts of `length` tokens."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    answers: list[Any] = llm.generate(prompts(batch, length), wanted, use_tqdm=False)
    return answers


def child(model: str, way: str, ranks: str, folder: str, extra: dict[str, Any]) -> None:
    """Start an engine; at each line `BATCH TOKENS PROMPT` on the input, generate and print seconds and the first tokens."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to the log

    def say(record: dict[str, Any]) -> None:
        channel.write(json.dumps(record) + "\n")
        channel.flush()

    from vllm import LLM

    register_loader()
    started = time.monotonic()
    llm = LLM(folder, **(engine_arguments(model, way, int(ranks)) | extra))
    say({"ready": time.monotonic() - started})
    for line in sys.stdin:
        batch, tokens, length = map(int, line.split())
        begin = time.perf_counter()
        answers = generate(llm, batch, tokens, length)
        seconds = time.perf_counter() - begin
        say({"seconds": seconds, "tokens": list(answers[0].outputs[0].token_ids[:16])})


class Engine:
    """A child process with one model, one way, and its number of ranks; `card` is where an engine of one rank runs."""

    def __init__(self, name: str, folder: Path, args: argparse.Namespace, card: int) -> None:
        self.model, _, rest = name.partition(":")
        way, _, ranks = rest.partition("@")
        self.way, self.name, plain = way, name, args.plain_vllm
        self._log = args.out.parent / f"{name.replace(':', '-').replace('@', '-')}.log"
        environment = os.environ | ENVIRONMENT.get(way, {})
        if not ranks:
            environment["CUDA_VISIBLE_DEVICES"] = str(card)
        if plain and way in ENVIRONMENT:
            environment["PYTHONPATH"] = f"{plain}:{environment['PYTHONPATH']}"
        command = [sys.executable, __file__, "--child", self.model, way, ranks or "1", str(folder)]
        self._process = subprocess.Popen(
            [*command, "--engine", args.engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            env=environment,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """The next record. Raises RuntimeError with the end of the log if the engine ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            record: dict[str, Any] = json.loads(line)
            return record
        lines = [line for line in self._log.read_text().splitlines() if "Error" in line]
        raise RuntimeError(" | ".join(lines[-3:])[-600:] or "ended without a word")

    def ask(self, batch: int, tokens: int, prompt: int = PROMPT_TOKENS) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch} {tokens} {prompt}\n")
        self._process.stdin.flush()
        return self.answer()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(engine: Engine, batch: int) -> dict[str, Any]:
    """Median of three: milliseconds a step, tokens a second of all sequences, and of the prefill."""
    few, many = 4, 20 if engine.way == "emulation" else 100
    warm = engine.ask(batch, many)
    rounds = [(engine.ask(batch, few)["seconds"], engine.ask(batch, many)["seconds"]) for _ in range(3)]
    step = sorted((long - short) / (many - few) for short, long in rounds)[1]
    first = min(short for short, _ in rounds) - (few - 1) * step
    return {
        "batch": batch,
        "step_ms": step * 1e3,
        "tokens_s": batch / step,
        "prefill_ms": first * 1e3,
        "tokens": warm["tokens"],
    }


class Report:
    def __init__(self, out: Path) -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        self._json = out.with_suffix(".json")
        self._text = out.with_suffix(".txt").open("w", encoding="utf-8")
        self.rows: list[dict[str, Any]] = []

    def line(self, text: str) -> None:
        for stream in (sys.stdout, self._text):
            stream.write(text + "\n")
            stream.flush()

    def row(self, text: str, **record: Any) -> None:
        self.rows.append(record)
        self._json.write_text(json.dumps(self.rows, indent=1))
        self.line(text)


def card() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def run(args: argparse.Namespace) -> int:
    report = Report(args.out)
    report.line(
        f"command: {shlex.join(['python', *sys.argv])}\ncard: {card()}\ndate: {time.strftime('%Y-%m-%d')}"
    )
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in {name.partition(":")[0] for name in args.only}:
            write_model(Path(folder, model), model)
        cards = len(card().splitlines())
        engines = [
            Engine(name, Path(folder, name.partition(":")[0]), args, number % cards)
            for number, name in enumerate(args.only)
        ]
        for step in (start, rows):
            for engine in engines:
                if engine.name not in failed:
                    try:
                        step(engine, report)
                    except RuntimeError as error:
                        failed.append(engine.name)
                        report.row(f"{engine.name}: {error}", name=engine.name, error=str(error))
        for engine in engines:
            engine.stop()
    return 1 if failed else 0


def start(engine: Engine, report: Report) -> None:
    report.line(f"{engine.name}: start {engine.answer()['ready']:.0f} s")


def rows(engine: Engine, report: Report) -> None:
    for batch in BATCHES:
        found = measure(engine, batch)
        report.row(
            f"{engine.name:30s} batch {batch:2d}: {found['step_ms']:7.2f} ms a step, {found['tokens_s']:7.1f} tokens/s, "
            f"prefill of {batch} x {PROMPT_TOKENS} {found['prefill_ms']:7.1f} ms, first tokens {found['tokens'][:6]}",
            name=engine.name,
            **found,
        )
    for length in LONG_PROMPTS:
        engine.ask(1, 1, length)
        seconds = sorted(engine.ask(1, 1, length)["seconds"] for _ in range(3))[1]
        report.row(
            f"{engine.name:30s} first token after {length} of prompt: {seconds * 1e3:.1f} ms",
            name=engine.name,
            prompt=length,
            first_token_ms=seconds * 1e3,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="result files without their ending")
    parser.add_argument("--only", nargs="+", default=DEFAULT, metavar="MODEL:WAY[@RANKS]")
    parser.add_argument("--plain-vllm", metavar="FOLDER")
    parser.add_argument("--engine", default="{}", help="more engine arguments, JSON")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child, json.loads(args.engine))
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
