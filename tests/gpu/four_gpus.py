"""Tensor parallelism over the GPUs of one host, through tritonserver with the profile of a V100 box; results as they come.

    tests/gpu/four_gpus.sh PARTS -- STEP... --out FOLDER [--ranks N] [--cpu --python .venv/bin/python]

Steps: `tiny` (greedy tokens of one rank against float32 and of N ranks against one, near-ties aside; a sweep with columns
of the cards; the engine, or one of its ranks, killed with streams open), `all-reduce`, `Qwen3-32B` and `qwen4_exp` (random
NVFP4 weights: time to READY, tokens/s, time to the first token, a rank killed, a sweep by perf_analyzer). A part of a step
that fails, or is not done in its time, is a row; the rest goes on. `--cpu` runs the same on vLLM's CPU engine with a small
shape. Prompts and answers are token ids: no tokenizer is needed.

On the lent machines (kind `nvidia-h200-x4`, 30 minutes of device time in all): first, on the machine with the checkout,

    .venv/bin/python tests/gpu/build_four_gpus_kit.py      1 to 5 minutes: what depends on the checkout is made anew

and then these calls, each as soon as the one before has answered (the machine stays warm for 30 s):

    carry           timeout_s  command                                                                      takes
    .kit/four/1     120        sh tests/gpu/four_gpus.sh .kit/four/1 && nvidia-smi topo -m                  30 s
    .kit/four/3     450        sh tests/gpu/four_gpus.sh .kit/four/3 -- tiny --out $OUT                     4 min
    .kit/four/2     560        sh tests/gpu/four_gpus.sh .kit/four/2 -- all-reduce Qwen3-32B --out $OUT     7 min
    nothing         480        sh tests/gpu/four_gpus.sh -- qwen4_exp --out $OUT                            6 min

The times are estimates, 18 minutes of 30 (engines alone took 45 and 115 s to start,
perf/results/end-to-end-h200x4.txt); the machine's start and the transfers come to them. A line of results.txt with
FAILED says what broke, logs.tar.xz of the same call has the server's log. Where `tiny` gets no server ready, give the
machine back and mend it here: the other steps would break likewise. Without part 2 ranks use PyTorch's own NCCL. On a
machine with one GPU the first two calls do (`tiny`, 2 min).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("tests/triton", "tests/bench", "backend", "perf", "clients")]
for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
    # four_gpus.sh set them for this interpreter; the server and the engine have others.
    if (given := os.environ.pop(f"FOUR_{name}", None)) is not None:
        os.environ.pop(name, None)
        os.environ.update({name: given} if given else {})

import end_to_end  # noqa: E402
from follow import Follow  # noqa: E402
from server import Server, shm_files, wait_for  # noqa: E402
from voltriton.processes import alive, command_line  # noqa: E402
from voltriton.settings import load_profile  # noqa: E402
from voltriton_perf import pa  # noqa: E402
from voltriton_perf.perf_analyzer import PerfAnalyzer  # noqa: E402
from voltriton_perf.stats import Record, summarise  # noqa: E402

# What a router or a vocabulary decides by less than float16 resolves may fall otherwise (tests/engine/reference.py).
NEAR_TIE = 0.03
STREAMS_END_S = 30.0  # of a killed rank, as tests/engine/test_faults_real.py holds it
LEFT_MIB = 64  # of a card, more than before
TEXTS = [
    "hello world",
    "this is a test of the tokenizer",
    "a b c d e f g",
    "zebra 12345 ?",
    "of the world " * 40,
]
TINY = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
SMALL |= {"num_key_value_heads": 4, "head_dim": 32, "vocab_size": 2048}
end_to_end.MODELS["small"] = {**end_to_end.MODELS["Qwen3-32B"], **SMALL}


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]  # lengths, for the time to the first token
    tokens: int
    sweep: tuple[int, ...]
    max_model_len: int


GPU = Plan((1, 8, 32), (512, 4096), 256, (1, 2, 4, 8, 16, 32, 64), 8192)
CPU = Plan((1, 2), (32, 256), 24, (1, 2, 4), 1024)
# What the profile says otherwise: sequences and graphs up to 64, and of each card what a V100 has.
GRAPHS = load_profile("v100-tp4")["engine"]["compilation_config"]
FULL_SIZE: dict[str, Any] = {
    "max_num_seqs": 64,
    "gpu_memory_utilization": 0.2,
    "compilation_config": {**GRAPHS, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
}
MORE: dict[str, dict[str, Any]] = {
    "Qwen3-32B": {},
    # Graphs of its own kind (tests/bench/end_to_end.py).
    "qwen4_exp": {
        "gpu_memory_utilization": 0.25,
        "compilation_config": {"cudagraph_capture_sizes": [1, 8, 32]},
    },
}


class Report:
    """`results.txt` and `results.json`, complete after every row."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.rows, self.failed = out, [], False

    def row(self, name: str, **values: Any) -> None:
        self.rows.append({"name": name, **values})
        (self.out / "results.json").write_text(json.dumps(self.rows, indent=1))
        line = f"{time.strftime('%H:%M:%S')} {name}: " + ", ".join(
            f"{k} {_short(v)}" for k, v in values.items()
        )
        with (self.out / "results.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    @contextlib.contextmanager
    def part(self, name: str, limit_s: int) -> Iterator[None]:
        """What fails inside, or is not done in time, is a row. The main thread must be in Python code, not in gRPC.

        A part inside another: that one's time goes on after it.
        """

        def late(*_: object) -> None:
            raise TimeoutError(f"not done within {limit_s} s")

        began, before = time.monotonic(), signal.signal(signal.SIGALRM, late)
        left_s = signal.alarm(limit_s)
        try:
            yield
        except Exception as error:
            self.failed = True
            self.row(name, FAILED=f"{type(error).__name__}: {error}"[-1500:])
        finally:
            signal.signal(signal.SIGALRM, before)
            signal.alarm(max(1, left_s - int(time.monotonic() - began)) if left_s else 0)


def _short(value: Any) -> Any:
    return f"{value:.2f}" if isinstance(value, float) else value


@dataclass(frozen=True)
class Setup:
    kit: Path
    ranks: int
    cpu: bool
    python: str
    plan: Plan

    @property
    def work(self) -> Path:
        return self.kit / "work"

    def environment(self) -> dict[str, str]:
        """Of the engine host, over the profile's."""
        ours = [self.kit / "plugin", ROOT / "tests/bench"]
        if self.cpu:
            return {"PYTHONPATH": joined(ours)}
        # Our plugin before the loader's: it brings operators that vLLM's modules ask for at import.
        found = {"PYTHONPATH": joined([self.kit / "site", ROOT / "patches", ROOT / "backend", *ours])}
        found |= {"VOLTRITON_FORCE_CAPABILITY": "7.0", "VOLTRITON_KERNEL_CACHE": str(self.kit / "ptx")}
        found |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "OMP_NUM_THREADS": "4", **NO_MULTICAST}
        return found | self.nccl()

    def nccl(self) -> dict[str, str]:
        library = self.kit / "nccl" / "libnccl.so.2"
        return {"VLLM_NCCL_SO_PATH": str(library)} if library.exists() else {}


# It can put the host's GPUs, which others share, out of service.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def joined(paths: Sequence[Path]) -> str:
    return ":".join(map(str, paths))


def lay_out(setup: Setup) -> None:
    """The plugin that registers `load_format` random_nvfp4 in every process of vLLM."""
    about = setup.kit / "plugin" / "random_nvfp4-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: random-nvfp4\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nrandom_nvfp4 = end_to_end:register_loader\n"
    )
    setup.work.mkdir(exist_ok=True)


def repository(setup: Setup, name: str, model: Path, ranks: int, arguments: dict[str, Any]) -> Path:
    folder = setup.work / f"repository-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "model_repository", folder)
    settings = {"profile": "cpu" if setup.cpu else "v100-tp4", "env": setup.environment()}
    content = {"model": str(model), "tensor_parallel_size": ranks, **arguments, "voltriton": settings}
    (folder / "vllm" / "1" / "model.json").write_text(json.dumps(content))
    return folder


@contextlib.contextmanager
def serving(
    setup: Setup, report: Report, name: str, model: Path, ranks: int, ready_s: int, **arguments: Any
) -> Iterator[Server]:
    """A server that is ready; RuntimeError or AssertionError with the end of its log where it does not get so.

    What is left of it after its end (processes, GPU memory, /dev/shm) is a row.
    """
    before, files = gpu_mib(), shm_files()
    log = report.out / f"{name}.log"
    folder = repository(setup, name, model, ranks, arguments)
    began = time.monotonic()
    # DCGM, which the metrics of cards would start, has nothing to do with what is measured here.
    options = ["--allow-gpu-metrics=false"]
    server = Server(folder, log, *options, env={"VOLTRITON_PYTHON": setup.python}, ready_s=ready_s)
    below: list[int] = []
    try:
        with server:
            report.row(f"{name}, {ranks} ranks", ready_s=time.monotonic() - began)
            try:
                yield server
            finally:
                below = server.children()
    except AssertionError as error:
        raise RuntimeError(f"{error}; log: {log.read_text(errors='replace')[-1200:]}") from None
    finally:
        with report.part(f"{name}: after the end", 60):
            wait_for(lambda: not any(map(alive, below)), 30, "all processes to be gone")
            wait_for(lambda: more_than(before) < LEFT_MIB, 20, "GPU memory to be free")
            left = sorted(shm_files() - files)
            report.row(
                f"{name}: after the end", gpu_mib_before=before, gpu_mib_after=gpu_mib(), shm_left=left
            )


def more_than(before: list[int]) -> int:
    """MiB in use beyond those, on the card where it is most."""
    return max((a - b for a, b in zip(gpu_mib(), before, strict=True)), default=0)


def gpu_mib() -> list[int]:
    """Memory in use, a card; nothing where there is no card."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return [
            int(x) for x in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
        ]
    except (OSError, subprocess.CalledProcessError):
        return []


_draw = random.Random(1)


def ids(length: int) -> list[int]:
    """No two prompts are alike: a prefix cache must not know them. Below every vocabulary here."""
    return [_draw.randrange(3, 250) for _ in range(length)]


def sampling(tokens: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **more}


def open_stream(server: Server, length: int, tokens: int) -> Follow:
    wanted = sampling(tokens, detokenize=False)
    return Follow(server.grpc_url, input_ids=ids(length), return_token_ids=True, sampling_parameters=wanted)


def finish(streams: Sequence[Follow], timeout_s: float) -> None:
    """RuntimeError where one ended with an error."""
    for stream in streams:
        stream.wait(timeout_s)
        stream.close()
        if problem := stream.answer.error or stream.broken:
            raise RuntimeError(problem)


def record(stream: Follow) -> Record:
    tokens = tuple(len(r["token_ids"]) for r in stream.answer.responses)
    return Record(stream.began, tuple(stream.times), tokens, stream.answer.error or stream.broken)


def rate(server: Server, batch: int, tokens: int) -> dict[str, Any]:
    """Tokens a second of all streams while all of them decode; prompts of 128 tokens.

    The client is one Python process: with many streams perf_analyzer (`sweep`) may see more.
    """
    streams = [open_stream(server, 128, tokens) for _ in range(batch)]
    finish(streams, 120)
    first, last = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    count = sum(
        n
        for r in map(record, streams)
        for t, n in zip(r.arrivals_s, r.tokens, strict=True)
        if first < t <= last
    )
    ttft = statistics.median(s.times[0] - s.began for s in streams)
    rates = (
        {"tokens_s": count / (last - first), "step_ms": (last - first) / count * batch * 1e3} if count else {}
    )
    return {
        "batch": batch,
        **rates,
        "ttft_p50_ms": ttft * 1e3,
        "tokens": sum(sum(record(s).tokens) for s in streams),
    }


def first_token(server: Server, length: int) -> dict[str, Any]:
    found = []
    for _ in range(4):
        stream = open_stream(server, length, 2)
        finish([stream], 60)
        found.append((stream.times[0] - stream.began) * 1e3)
    return {"prompt_tokens": length, "ttft_ms": statistics.median(found[1:]), "first_ms": found[0]}


def sweep(setup: Setup, server: Server, concurrency: int) -> dict[str, Any]:
    """Closed loop, prompts of 128 tokens, by perf_analyzer; by our own client where that fails."""
    level = pa.Level("concurrency", concurrency, max(8, 2 * concurrency))
    tokens = setup.plan.tokens // 2
    tool, records = "perf_analyzer", []
    try:
        data = analyzer_input(level.requests, tokens)
        home = PerfAnalyzer(setup.kit / "root" / "perf_analyzer")
        records = pa.run(home, level, "vllm", server.grpc_url, data, setup.work, 60)
    except (pa.AnalyzerError, OSError) as error:
        tool = f"own client ({error})"

        def one(_: int) -> Record:
            stream = open_stream(server, 128, tokens)
            stream.wait(60)
            return record(stream.close())

        with ThreadPoolExecutor(concurrency) as pool:
            records = list(pool.map(one, range(level.requests)))
    found = summarise(records)
    spreads = {k: (getattr(found, k) or {}).get("p50") for k in ("ttft_ms", "itl_ms", "e2e_ms")}
    numbers = {
        k: getattr(found, k) for k in ("requests", "failed", "requests_s", "output_tokens_s", "output_tokens")
    }
    return {
        "concurrency": concurrency,
        "tool": tool,
        **numbers,
        **{f"{k}_p50": v for k, v in spreads.items()},
    }


def analyzer_input(count: int, tokens: int) -> dict[str, Any]:
    """A text in every response (logprobs: null) tells it from perf_analyzer's empty final ones."""
    asked = {"stream": [True], "return_num_output_tokens": [True], "return_logprobs": [True]}
    wanted = json.dumps(sampling(tokens, detokenize=False))
    prompts = [{"input_ids": {"content": ids(128), "shape": [128]}} for _ in range(count)]
    return {"data": [{**prompt, "sampling_parameters": [wanted], **asked} for prompt in prompts]}


def kill_rank(server: Server, streams: int, tokens: int, back_s: float) -> dict[str, Any]:
    """SIGKILL of the last rank with streams open; a single rank is in the engine's own process.

    AssertionError where a stream does not end as it must.
    """
    engine = [pid for pid in server.children() if command_line(pid).startswith("VLLM::")]
    ranks = [pid for pid in engine if command_line(pid).startswith("VLLM::Worker")] or engine
    followed = [open_stream(server, 16, tokens) for _ in range(streams)]
    for stream in followed:
        stream.wait_for_text(60)
    began = time.monotonic()
    os.kill(max(ranks), signal.SIGKILL)
    for stream in followed:
        stream.wait(STREAMS_END_S)
        stream.close()
        error = stream.answer.error or ""
        assert error.startswith("UNAVAILABLE: "), (
            f"the stream ended with {error or stream.broken or 'no error'!r}"
        )
        assert (stream.answer.errors, stream.answer.finals) == (1, 1), "a stream ends once"
    ended = max(stream.ended for stream in followed) - began
    wait_for(lambda: not any(map(alive, engine)), 20, "the broken engine's processes to be gone")
    gone = time.monotonic() - began

    def answers() -> bool:
        stream = open_stream(server, 16, 2)
        stream.wait(60)
        if well := not (stream.close().answer.error or stream.broken):
            return well
        time.sleep(0.5)
        return False

    wait_for(answers, back_s, "the engine to be back")
    back = time.monotonic() - began
    return {
        "streams": streams,
        "streams_ended_s": ended,
        "processes_gone_s": gone,
        "back_s": back,
        "error": error[:160],
    }


def greedy(server: Server) -> list[list[tuple[int, float]]]:
    """(token, how far the second choice was behind) of each answer."""
    wanted = sampling(32, logprobs=2)
    streams = [
        Follow(server.grpc_url, t, return_token_ids=True, return_logprobs=True, sampling_parameters=wanted)
        for t in TEXTS
    ]
    finish(streams, 60)
    return [list(zip(s.answer.joined("token_ids"), margins(s), strict=True)) for s in streams]


def margins(stream: Follow) -> list[float]:
    found = []
    for each in itertools.chain.from_iterable(
        json.loads(r["logprobs"][0]) or [] for r in stream.answer.responses
    ):
        best = sorted((entry["logprob"] for entry in each.values()), reverse=True)
        found.append(best[0] - best[1])
    return found


def compare(one: list[list[tuple[int, float]]], many: list[list[tuple[int, float]]]) -> dict[str, int]:
    """Up to the first difference of a sequence: what follows has another prompt. As far as both go."""
    found = {"positions": 0, "equal": 0, "near_ties": 0, "different": 0}
    for a, b in zip(one, many, strict=True):
        for (token, margin), (other, _) in zip(a, b, strict=False):
            found["positions"] += 1
            found["equal"] += token == other
            if token != other:
                found["near_ties" if margin < NEAR_TIE else "different"] += 1
                break
    return found


def tiny(setup: Setup, report: Report) -> None:
    """A random model with real scales (tests/engine/make_tiny.py), made by the engine's Python."""
    folder = setup.work / "tiny"
    if not folder.exists():
        code = "import json, pathlib, sys, make_tiny as m; m.make(pathlib.Path(sys.argv[1]), 'qwen3', **json.loads(sys.argv[2]))"
        run_engine_python(setup, "-c", code, str(folder), json.dumps(TINY))
    arguments: dict[str, Any] = {"max_model_len": 3500}
    if not setup.cpu:
        arguments["gpu_memory_utilization"] = 0.05
    answers: dict[str, list[list[tuple[int, float]]]] = {}
    with report.part("tiny, float32", 120):
        answers["float32"] = reference_answers(setup, folder / "deq")
    for ranks in sorted({1, setup.ranks}):
        with (
            report.part(f"tiny, {ranks} ranks", 400),
            serving(setup, report, f"tiny-{ranks}", folder / "mo_w4a4", ranks, 240, **arguments) as server,
        ):
            found = greedy(server)
            for other, expected in answers.items():
                compared = compare(expected, found)
                ok = compared["different"] == 0
                report.row(f"tiny, {ranks} ranks against {other}", **compared, ok=ok)
            answers[f"{ranks} ranks"] = found
            if ranks == 1:
                with report.part("tiny, sweep", 120):
                    report.row("tiny, sweep", **gpu_columns(setup, report, server, folder / "base"))
            report.row(f"tiny, one of {ranks} ranks killed", **kill_rank(server, 4, 3000, 180))


def run_engine_python(setup: Setup, *words: str) -> None:
    paths = joined([ROOT / name for name in ("tests/engine", "backend", "perf", "clients")])
    environment = {**os.environ, "PYTHONPATH": f"{setup.kit / 'clients'}:{paths}"}
    done = subprocess.run(
        [setup.python, *words], capture_output=True, text=True, timeout=240, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{words[:3]}: {(done.stdout + done.stderr)[-1200:]}")


def reference_answers(setup: Setup, model: Path) -> list[list[tuple[int, float]]]:
    """As `greedy`, by Hugging Face in float32."""
    code = (
        "import json, sys, logits; found = logits.hf(sys.argv[1], {'prompts': json.loads(sys.argv[2])}); "
        "margins = [[float(a - b) for a, b in (row.topk(2).values for row in rows)] for rows in found['steps']]; "
        "json.dump([found['tokens'], margins], open(sys.argv[3], 'w'))"
    )
    out = setup.work / "reference.json"
    run_engine_python(setup, "-c", code, str(model), json.dumps(TEXTS), str(out))
    tokens, margins = json.loads(out.read_text())
    return [list(zip(a, b, strict=True)) for a, b in zip(tokens, margins, strict=True)]


def gpu_columns(setup: Setup, report: Report, server: Server, model: Path) -> dict[str, Any]:
    """`voltriton sweep` by the engine's Python, which has NVML: what it says of the cards."""
    words = ["--server", server.grpc_url, "--metrics", f"http://127.0.0.1:{server.metrics}/metrics"]
    words += [
        "--tokenizer",
        str(model),
        "--prompt-tokens",
        "64",
        "--output-tokens",
        "256",
        "--tool",
        "client",
    ]
    words += ["--concurrency", "1", "8", "--requests", "24", "--out", str(report.out), "--name", "sweep"]
    run_engine_python(setup, "-m", "voltriton.cli", "sweep", *words)
    found = json.loads((report.out / "sweep.json").read_text())
    return {
        "cards": [card["name"] for card in found["setup"]["hardware"]["gpus"]],
        **{
            f"{level['value']:g} streams": {k: v for k, v in level["server"].items() if k.startswith("gpu")}
            for level in found["levels"]
        },
        "failed": [level["failed"] for level in found["levels"]],
        "tokens_s": [level["summary"]["output_tokens_s"] for level in found["levels"]],
    }


def all_reduce(setup: Setup, report: Report) -> None:
    if setup.cpu:
        report.row("all-reduce", skipped="needs GPUs")
        return
    site = setup.kit / "site90"
    if not site.exists():
        shutil.copytree(setup.kit / "site", site, copy_function=os.link)
        shutil.copytree(setup.kit / "c90", site, dirs_exist_ok=True)
    program = [setup.python, str(ROOT / "tests/bench/all_reduce.py"), "--out", str(report.out / "all-reduce")]
    environment = {
        **os.environ,
        "PYTHONPATH": joined([site, ROOT / "patches"]),
        **setup.nccl(),
        **NO_MULTICAST,
    }
    with report.part("all-reduce", 120):
        done = subprocess.run(program, capture_output=True, text=True, timeout=110, env=environment)
        (report.out / "all-reduce.log").write_text(done.stdout + done.stderr)
        report.row("all-reduce", status=done.returncode, lines=done.stdout.splitlines()[-4:])


def full_size(setup: Setup, report: Report, name: str) -> None:
    folder, plan = setup.work / name, setup.plan
    shutil.rmtree(folder, ignore_errors=True)
    end_to_end.write_model(folder, "small" if setup.cpu else name)
    arguments: dict[str, Any] = {
        "load_format": "random_nvfp4",
        "skip_tokenizer_init": True,
        "max_model_len": plan.max_model_len,
    }
    if not setup.cpu:
        arguments |= FULL_SIZE | MORE[name]
    with contextlib.ExitStack() as stack:
        # The time to READY is held by the server's own limit.
        try:
            server = stack.enter_context(serving(setup, report, name, folder, setup.ranks, 300, **arguments))
        except (RuntimeError, OSError) as error:
            report.failed = True
            report.row(name, FAILED=str(error)[-1500:])
            return
        with report.part(f"{name}: warm-up", 120):
            rate(server, max(plan.batches), 8)
            rate(server, 1, 8)
        parts: list[tuple[int, Callable[[], dict[str, Any]]]] = [
            *((60, partial(rate, server, batch, plan.tokens)) for batch in plan.batches),
            *((60, partial(first_token, server, length)) for length in plan.prompts),
            *((75, partial(sweep, setup, server, concurrency)) for concurrency in plan.sweep),
        ]
        if name == "Qwen3-32B":
            parts.append((260, partial(kill_rank, server, 8, plan.max_model_len - 100, 200)))
        for limit_s, measure in parts:
            with report.part(name, limit_s):
                report.row(name, **measure())


def keep_logs(report: Report) -> None:
    """One archive: few files come back from a lent machine."""
    logs = sorted(report.out.glob("*.log"))
    with tarfile.open(report.out / "logs.tar.xz", "w:xz") as archive:
        for log in logs:
            archive.add(log, log.name)
    for log in logs:
        log.unlink()


STEPS: dict[str, Callable[[Setup, Report], None]] = {
    "tiny": tiny,
    "all-reduce": all_reduce,
    "Qwen3-32B": lambda setup, report: full_size(setup, report, "Qwen3-32B"),
    "qwen4_exp": lambda setup, report: full_size(setup, report, "qwen4_exp"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("steps", nargs="+", choices=STEPS, metavar="STEP")
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, help="default: the number of GPUs")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--python", default=shutil.which("python3"), help="of the engine (%(default)s)")
    args = parser.parse_args()
    os.environ["VOLTRITON_HOME"] = str(args.kit.absolute() / "root")
    ranks = args.ranks or max(1, len(gpu_mib()))
    setup = Setup(args.kit.absolute(), ranks, args.cpu, args.python, CPU if args.cpu else GPU)
    report = Report(args.out)
    card = "CPU" if args.cpu else end_to_end.card().replace("\n", "; ")
    report.row("run", steps=args.steps, ranks=ranks, card=card, python=args.python, gpu_mib=gpu_mib())
    lay_out(setup)
    for step in args.steps:
        try:
            STEPS[step](setup, report)
        except Exception as error:  # the next step is not to suffer
            report.failed = True
            report.row(step, FAILED=f"{type(error).__name__}: {error}"[-1500:])
    keep_logs(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
