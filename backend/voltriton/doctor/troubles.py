"""The troubles that people had with V100s and vLLM, and which check sees each.

`python -m voltriton.doctor.troubles` prints the table of docs/operations.md.
Where no check can see one, `unseen` says what covers it, or that nothing does.
"""

from __future__ import annotations

from typing import NamedTuple

from voltriton.doctor import command  # noqa: F401  (registers all checks)
from voltriton.doctor.rows import CHECKS


class Trouble(NamedTuple):
    source: str
    symptom: str
    remedy: str
    unseen: str = ""


TROUBLES = {
    1: Trouble(
        "vllm#946, #730",
        "'Bfloat16 is only supported on GPUs with compute capability of at least 8.0'",
        "dtype float16",
    ),
    2: Trouble("vllm#13398", "the V1 engine refuses V100", "vLLM 0.10.2 or newer; here 0.32.0"),
    3: Trouble("vllm#27729", "crash at start on V100", "a build with sm_70 code"),
    4: Trouble("vllm#19185", "built for 7.0, still 'no kernel image'", "every extension for 7.0"),
    5: Trouble("LocalAI#9948", "CUDA 13 images never work", "CUDA 12 image"),
    6: Trouble("unsloth#5876", "pip picks a CUDA 13 wheel by the driver's version", "name the cu126 wheel"),
    7: Trouble("FreeToken#253", "PyTorch of cu128/cu129: no kernel image", "cu126 wheel"),
    8: Trouble("pytorch#157517", "which wheels keep Volta", "cu126 does"),
    9: Trouble("1Cat#87", "gptq_marlin_repack has no SM70 image", "TORCH_CUDA_ARCH_LIST=7.0 alone"),
    10: Trouble("1Cat#94", "'Min capability: 75. Current: 70'", "our patches, applied"),
    11: Trouble(
        "vllm#22800",
        "AWQ/GPTQ experts do not run on V100",
        "NVFP4 through our plugin",
    ),
    12: Trouble("vllm#17541", "gptq_bitblas chosen, breaks GPTQ", "NVFP4 through our plugin"),
    13: Trouble("1Cat#105", "tilelang 0.1.9: nvcc fails for sm_70", "uninstall tilelang"),
    14: Trouble(
        "1Cat#193",
        "a prebuilt wheel still wants nvcc",
        "nothing of ours compiles with nvcc at run time (NVRTC wheel)",
    ),
    15: Trouble("1Cat#108", "'No CUDA or HIP', first error hidden", "as 14"),
    16: Trouble("1Cat#42", "undefined symbol at import", "the pinned set of wheels"),
    17: Trouble("1Cat#237", "tilelang's trace at start", "uninstall tilelang"),
    18: Trouble("flash-attention-v100#31", "stock wheel: EngineCore fails", "a build with sm_70 code"),
    19: Trouble("2080Ti-Definitive#17", "'vllm_flash_attn requires _vllm_fa2_C'", "our patches, applied"),
    20: Trouble("1Cat 2f5c64289", "a wheel without its extensions", "rebuild"),
    21: Trouble(
        "1Cat docs",
        "a fast path silently off, 20 % slower",
        "-",
        "a kernel of ours that cannot be compiled ends the load with its name",
    ),
    22: Trouble(
        "1Cat README", "run inside a source tree: the wrong vllm is imported", "start from another folder"
    ),
    23: Trouble("LightLLM#1029", "ptxas: cvt.bf16.f32 needs sm_80", "float16, Triton 3.7 or newer"),
    24: Trouble("Flash-Next#7", "'fp8e4nv not supported'", "kv_cache_dtype auto"),
    25: Trouble(
        "triton#5066", "tl.dot runs on FMA units below 8.0", "known cost; hot products are CUDA kernels"
    ),
    26: Trouble("triton#3478, #4037", "fp16 tl.dot gives zeros (Triton 2.x)", "Triton 3.x"),
    27: Trouble("1Cat#430", "TP2 over PCIe: capture never ends, Xid 62", "disable_custom_all_reduce true"),
    28: Trouble("1Cat#57", "TP2 over PHB: segfault in libcuda", "one card, or NCCL_P2P_DISABLE=1"),
    29: Trouble("nccl#199", "nccl-tests hang on V100 PCIe", "ACS off"),
    30: Trouble("nccl#667", "hang on PXB/PIX pairs", "VT-d or ACS off"),
    31: Trouble("nccl#606", "hang between GPU 2 and 3", "ACS off (SrcValid+)"),
    32: Trouble("nccl#2079", "deadlock over PHB", "`setpci -s BRIDGE ECAP_ACS+6.w=0` or iommu=pt"),
    33: Trouble("nccl-tests#117", "hang with P2P on an AMD host", "NCCL_P2P_DISABLE=1"),
    34: Trouble("vllm#4432", "custom all-reduce fails at capture (driver 450)", "a newer driver"),
    35: Trouble(
        "vllm#8058, #6732",
        "hang or 'unhandled cuda error' at NCCL init",
        "driver, NCCL_SOCKET_IFNAME unset on one host",
    ),
    36: Trouble(
        "llama.cpp#24489", "NCCL writes out of bounds", "NCCL 2.27.5 or newer (vLLM 0.32 wants 2.29.7)"
    ),
    37: Trouble("vllm-benchmarking#126", "P2P under graph replay hangs or reads NaN", "NCCL_P2P_DISABLE=1"),
    38: Trouble(
        "1Cat docs",
        "custom all-reduce under graphs stops after 22 tokens",
        "disable_custom_all_reduce true",
    ),
    39: Trouble("1Cat diff", "first outputs after capture are wrong", "disable_custom_all_reduce true"),
    40: Trouble(
        "ReVolta", "custom all-reduce breaks with expandable_segments", "unset PYTORCH_CUDA_ALLOC_CONF"
    ),
    41: Trouble("1Cat PR 547", "expert parallel slower than TP4", "stay with tensor parallel"),
    42: Trouble(
        "1Cat#76",
        "out of memory where an older version ran",
        "`voltriton plan`; shorter context, smaller steps",
    ),
    43: Trouble("1Cat#8", "vision profile run out of memory", "language_model_only true"),
    44: Trouble("lmdeploy#4558", "27B out of memory on 32 GB", "`voltriton plan`"),
    45: Trouble("2x3090#2", "out of host memory at the first prompt", "table + 16 GiB of host memory"),
    46: Trouble(
        "vllm#56824", "host collapses, negative KV cache", "a smaller table or utilisation; `voltriton plan`"
    ),
    47: Trouble("club-170hx#46", "table of 102 GB pinned on a 31 GB host", "fp8 or NVFP4 table"),
    48: Trouble(
        "recipes#923", "table on the GPUs: out of memory", "engram_config with cpu_offload (vLLM's default)"
    ),
    49: Trouble("1Cat#248", "CPU offload refused with expandable_segments", "unset PYTORCH_CUDA_ALLOC_CONF"),
    50: Trouble("ReVolta", "8 prefills at once exceed the profiled memory", "max_num_batched_tokens 2048"),
    51: Trouble("ReVolta", "graphs are not in the profile run", "gpu_memory_utilization 0.90"),
    52: Trouble("1Cat docs", "a prefill path took 10.6 GiB a rank", "-"),
    53: Trouble("1Cat docs", "1M context reserves 8.3 GiB", "a smaller max_model_len"),
    54: Trouble("vllm#3998", "only '!!!!'", "float16 overflow or a bad card: `voltriton verify`, ECC row"),
    55: Trouble("Qwen3#381", "'!!!' after quantising", "calibrate; `voltriton verify`"),
    56: Trouble(
        "1Cat#30",
        "the thinking text is all '!'",
        "as 54",
        "`voltriton verify` measures perplexity before serving",
    ),
    57: Trouble(
        "1Cat#23",
        "NUL characters with FLASH_ATTN_V100",
        "TRITON_ATTN, which is what runs here",
        "that backend is not in this build",
    ),
    58: Trouble(
        "1Cat 23f98c32b",
        "results differ from run to run (D=128 prefill)",
        "-",
        "that kernel is not here; tests/gpu compares ours with a reference",
    ),
    59: Trouble(
        "1Cat 8aa6b241b",
        "results differ for head sizes other than 256",
        "-",
        "that kernel is not here; tests/gpu compares ours with a reference",
    ),
    60: Trouble(
        "1Cat 5c8da8601",
        "a fallback gives NaN silently",
        "-",
        "a kernel of ours that cannot be compiled ends the load with its name",
    ),
    61: Trouble("lmdeploy#2332", "AWQ 72B: garbage on V100", "NVFP4 and `voltriton verify`"),
    62: Trouble(
        "1Cat#166", "scales 100 times off (convention guessed)", "decided from metadata; refused when missing"
    ),
    63: Trouble(
        "1Cat docs",
        "greedy output differs at the third repeat",
        "-",
        "that kernel is not here; tests/gpu compares ours with a reference",
    ),
    64: Trouble("1Cat docs", "KV cache alternates rotated/unrotated", "-", "that model is not served here"),
    65: Trouble(
        "1Cat#408", "Flash-Next quality below the original", "`voltriton verify`", "`voltriton verify`"
    ),
    66: Trouble("vllm#53896", "NVFP4 table: scale missing or shadowed", "a checkpoint with all scales"),
    67: Trouble("backport#92", "gibberish in long agent loops", "-", "nothing here looks for it"),
    68: Trouble(
        "1Cat 1.2.2",
        "fp8 cache corrupt at 262120 tokens",
        "kv_cache_dtype auto",
    ),
    69: Trouble("1Cat docs", "`fp8` means e4m3 or e5m2 by version; prefill -83 %", "kv_cache_dtype auto"),
    70: Trouble("vLLM config", "gemma2/3, glm4 are unstable in float16", "another model or float32"),
    71: Trouble("1Cat release", "a cached AOT graph changes greedy tokens", "VLLM_USE_AOT_COMPILE=0"),
    72: Trouble("vllm#3944, #13738", "prefix caching aborts: mma layout conversion", "Triton 3.x"),
    73: Trouble(
        "1Cat e8a0bc8f7",
        "OutOfResources: 102400 > 98304 bytes of shared memory",
        "-",
        "nothing looks for it before the first launch; kernels of ours state their size when compiled",
    ),
    74: Trouble("1Cat#40, vllm#57712", "large heads exceed shared memory", "-", "as 73"),
    75: Trouble("lmdeploy#4412", "'No decoding kernel found decode_d256'", "-", "as 73"),
    76: Trouble(
        "1Cat#73",
        "MTP: 'Missing cached draft probabilities'",
        "no speculative_config",
    ),
    77: Trouble(
        "1Cat#230",
        "a sampled request in a greedy batch kills the engine (MTP)",
        "no speculative_config",
    ),
    78: Trouble("1Cat 1.2.2", "MTP crashes near the context limit", "no speculative_config"),
    79: Trouble(
        "vllm#53899",
        "hang after capture (shm_broadcast 60 s)",
        "/dev/shm of 1 GiB or more; leftovers stopped; start_timeout_s",
    ),
    80: Trouble("inference-atlas#83", "VLLM_PLE_CPU_OFFLOAD=1 spins for ever", "unset it"),
    81: Trouble("llama.cpp#28661", "flash attention crashes on odd head sizes", "-", "not llama.cpp here"),
    82: Trouble(
        "lmdeploy#4423, #4426", "6 to 22 tokens/s, one CPU core at 100 %", "CPU governor, NUMA binding"
    ),
    83: Trouble("emmy#733", "TP8 over PHB slower than TP2", "fewer ranks"),
    84: Trouble(
        "1Cat notes", "more than 2 requests fall to eager", "cudagraph_capture_sizes up to max_num_seqs"
    ),
    85: Trouble(
        "1Cat release",
        "the first request of a new shape stalls",
        "-",
        "the host generates one token before it is ready; other shapes may still compile at their first use",
    ),
    86: Trouble(
        "ReVolta",
        "greedy output changes with the batch",
        "-",
        "batch-dependent sums; documented, not a fault",
    ),
    87: Trouble(
        "1Cat docs",
        "clocks and power explain a slow run",
        "rows gpu.clocks, gpu.power_limit, gpu.throttle; the thermal sampler",
    ),
}


def seen_by(number: int) -> list[str]:
    return sorted(check.name for check in CHECKS.values() if number in check.troubles)


def table() -> str:
    lines = ["| # | seen in | symptom | what to do | doctor row |", "| --- | --- | --- | --- | --- |"]
    for number, trouble in TROUBLES.items():
        seen = ", ".join(f"`{name}`" for name in seen_by(number)) or f"none: {trouble.unseen}"
        lines.append(f"| {number} | {trouble.source} | {trouble.symptom} | {trouble.remedy} | {seen} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
