"""The planner: sizes against hand reckoning and published shapes, advice, profiles, bad input."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from voltriton.planner import main
from voltriton.planner.advice import advise, profile
from voltriton.planner.cards import GIB, parse_cards
from voltriton.planner.files import PlanError, read_model
from voltriton.planner.layout import TABLE, weights
from voltriton.planner.memory import Plan, Request, make_plan
from voltriton.planner.quantization import plain, quantized_names
from voltriton.planner.roofline import expert_share, roofline

QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 25600,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
# The geometry of /work/shared/design/volta-facts.md, section 2.4.
FLASH_NEXT = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "model_type": "qwen4_exp",
    "text_config": {
        "model_type": "qwen4_exp_text",
        "hidden_size": 2560,
        "num_hidden_layers": 48,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "hc_count": 4,
        "hc_lowrank": 320,
        "ple_layer_ids": [1],
        "mamba_ssm_dtype": "float32",
    },
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["*self_attn*", "*linear_attn*", "*shared_expert*", "lm_head"],
    },
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262144,
}


def folder(
    path: Path, config: dict[str, Any], tensors: dict[str, tuple[str, list[int]]] | None = None
) -> Path:
    """A model's folder; the safetensors file has a header and no data, which is all that is read."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        header = json.dumps(
            {name: {"dtype": d, "shape": s, "data_offsets": [0, 0]} for name, (d, s) in tensors.items()}
        ).encode()
        (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def plan_for(path: Path, config: dict[str, Any], gpus: str = "4xV100-32", **changes: Any) -> Plan:
    return make_plan(read_model(folder(path, config)), Request(parse_cards(gpus), **changes))


def test_dense_by_hand(tmp_path: Path) -> None:
    """Qwen3-32B in float16 on four ranks, added up here."""
    plan = plan_for(tmp_path / "m", QWEN3_32B)
    layer = 5120 * (16 + 2 + 2) * 128 + 5120 * 16 * 128 + 3 * 5120 * 25600 // 4 + 2 * 128 + 2 * 5120
    assert plan.parts["dense"] == 2 * (64 * layer + 5120)
    assert plan.parts["embeddings"] == 2 * 2 * 151936 // 4 * 5120
    assert plan.cache is not None
    # Two key-value heads a rank, keys and values, 128 numbers of 2 bytes, 64 layers.
    assert plan.cache.block_bytes == 16 * 2 * 2 * 128 * 2 * 64
    assert plan.kv_tokens == plan.left // plan.cache.block_bytes * 16


def test_nvfp4_takes_4_and_a_half_bits(tmp_path: Path) -> None:
    full = plan_for(tmp_path / "a", QWEN3_32B)
    packed = plan_for(tmp_path / "b", {**QWEN3_32B, "quantization_config": NVFP4})
    assert packed.parts["dense"] / full.parts["dense"] == pytest.approx(4.5 / 16, rel=1e-3)
    assert packed.parts["embeddings"] == full.parts["embeddings"]


def test_published_numbers_of_flash_next(tmp_path: Path) -> None:
    """Section 2.4 and 3 of volta-facts.md: 15.82 GiB of experts a rank, 242 tokens/s, 1110 at batch 8."""
    files = read_model(folder(tmp_path / "m", FLASH_NEXT))
    plan = make_plan(files, Request(parse_cards("4xV100-32")))
    assert plan.parts["experts"] / GIB == pytest.approx(15.82, abs=0.01)
    assert plan.weights / GIB == pytest.approx(19.2, abs=0.1)
    assert plan.host[TABLE] / GIB == pytest.approx(95.4, abs=0.1)
    assert plan.fits
    for batch, expected in ((1, 242), (8, 1110)):
        found = roofline(files, plan, batch, 8192)
        assert found is not None and found.tokens_per_s == pytest.approx(expected, rel=0.01)


def test_total_parameters_of_flash_next(tmp_path: Path) -> None:
    layout = weights(read_model(folder(tmp_path / "m", FLASH_NEXT)).config)
    assert layout is not None
    count = {True: 0, False: 0}
    for weight in layout:
        count[weight.part == TABLE] += weight.rows * weight.columns * weight.count
    assert count[False] == pytest.approx(125.7e9, rel=0.005)
    assert count[True] == pytest.approx(51.2e9, rel=0.001)


def test_roofline_of_qwen3_32b(tmp_path: Path) -> None:
    files = read_model(folder(tmp_path / "m", {**QWEN3_32B, "quantization_config": NVFP4}))
    plan = make_plan(files, Request(parse_cards("4xV100-32")))
    for context, expected in ((1024, 186), (8192, 169)):
        found = roofline(files, plan, 1, context)
        assert found is not None and found.tokens_per_s == pytest.approx(expected, rel=0.02)


def test_share_of_experts(tmp_path: Path) -> None:
    files = read_model(folder(tmp_path / "m", FLASH_NEXT))
    assert expert_share(files, 1) == pytest.approx(10 / 512)
    assert 512 * expert_share(files, 8) == pytest.approx(75, abs=0.5)


def test_hybrid_blocks_hold_the_state(tmp_path: Path) -> None:
    """vLLM raises the block's tokens until one holds a layer's state."""
    plan = plan_for(tmp_path / "m", {**QWEN3_NEXT, "quantization_config": NVFP4}, gpus="4xV100-32")
    assert plan.left > 0
    assert plan.cache is not None
    state = (2 * 16 * 128 + 32 * 128) // 4 * 3 * 2 + 32 // 4 * 128 * 128 * 2
    token = 2 * 1 * 256 * 2
    assert plan.cache.block_tokens == 16 * -(-state // (16 * token))
    assert plan.cache.block_bytes == 12 * plan.cache.block_tokens * token
    assert plan.cache.state_blocks == 3
    assert plan.cache.state_bytes == 36 * state
    # A short sequence takes one block of tokens and three of state.
    assert plan.cache.sequences(plan.left, 10) == (plan.cache.blocks(plan.left) - 1) // 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.experts.7.down_proj", "mlp.experts.down_proj"),
        ("model.language_model.layers.11.self_attn.q_proj", "self_attn.q_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_plain_names(name: str, expected: str) -> None:
    assert plain(name) == expected


MODELOPT = {
    "model.layers.0.mlp.down_proj.weight": ("U8", [64, 32]),
    "model.layers.0.mlp.down_proj.weight_scale": ("F8_E4M3", [64, 4]),
}
COMPRESSED = {"model.layers.0.self_attn.q_proj.weight_packed": ("U8", [64, 32])}


@pytest.mark.parametrize(
    ("quantization", "tensors", "expected"),
    [
        ({"quant_algo": "NVFP4"}, MODELOPT, {"mlp.down_proj"}),
        ({"format": "nvfp4-pack-quantized"}, COMPRESSED, {"self_attn.q_proj"}),
        (
            {"quant_algo": "NVFP4", "ignore": ["*self_attn*", "lm_head"]},
            None,
            {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"},
        ),
        (
            {"format": "nvfp4-pack-quantized", "ignore": ["re:.*mlp.*", "lm_head"]},
            None,
            {f"self_attn.{name}_proj" for name in "qkvo"},
        ),
        ({"quant_method": "awq"}, None, set()),
        ({}, None, set()),
    ],
)
def test_which_matrices_are_nvfp4(
    quantization: dict[str, Any], tensors: Any, expected: set[str], tmp_path: Path
) -> None:
    files = read_model(folder(tmp_path / "m", {**QWEN3_32B, "quantization_config": quantization}, tensors))
    layout = weights(files.config)
    assert layout is not None
    assert quantized_names(files, layout) == expected


def test_modelopts_older_file_is_read(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", QWEN3_32B)
    (path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}})
    )
    assert make_plan(read_model(path), Request(parse_cards("4xV100-32"))).weights / GIB < 6


def test_advice_fits_and_is_small(tmp_path: Path) -> None:
    files = read_model(folder(tmp_path / "m", QWEN3_32B))
    plan = make_plan(files, Request(parse_cards("2xV100-32")))
    assert not plan.fits
    found = advise(files, plan)
    assert found and all(item.plan.fits for item in found)
    assert any("NVFP4" in item.text for item in found) and any("4 cards" in item.text for item in found)
    assert advise(files, make_plan(files, Request(parse_cards("8xV100-32")))) == []


def test_a_shorter_context_is_tried_first(tmp_path: Path) -> None:
    files = read_model(folder(tmp_path / "m", {**QWEN3_32B, "quantization_config": NVFP4}))
    plan = make_plan(files, Request(parse_cards("V100-32"), max_model_len=40960))
    first = advise(files, plan)[0]
    assert first.text.startswith("max_model_len ") and first.plan.request.max_model_len < 40960


def test_the_written_profile_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from voltriton import settings

    path = folder(tmp_path / "m", {**QWEN3_32B, "quantization_config": NVFP4})
    assert (
        main(
            [
                str(path),
                "--gpus",
                "2xV100-32",
                "--max-model-len",
                "16384",
                "--write",
                str(tmp_path / "mine.json"),
            ]
        )
        == 0
    )
    monkeypatch.setattr(settings, "PROFILES", tmp_path)
    loaded = settings.load_profile("mine")
    assert loaded["engine"]["tensor_parallel_size"] == 2 and loaded["engine"]["max_model_len"] == 16384
    assert loaded["engine"]["dtype"] == "float16" and loaded["env"]["HF_HUB_OFFLINE"] == "1"
    written = json.loads((tmp_path / "mine.json").read_text())
    assert all(entry["reason"] for part in written.values() for entry in part.values())


def test_a_cpu_plan_is_bound_by_its_cache(tmp_path: Path) -> None:
    plan = plan_for(tmp_path / "m", QWEN3_32B, gpus="CPU", max_model_len=1024, cpu_kv_gib=2.0)
    assert plan.left == 2 * GIB and plan.cache is not None
    assert plan.kv_tokens == 2 * GIB // (128 * 2 * 8 * 128 * 4 * 64) * 128
    assert profile(plan)["env"]["VLLM_CPU_KVCACHE_SPACE"]["value"] == "2"


def test_unknown_architectures_go_by_size_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(
        tmp_path / "m",
        {"model_type": "frobnicator"},
        {"a.weight": ("BF16", [4096, 4096]), "b": ("F32", [4096])},
    )
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "frobnicator is not known here" in out and "KV cache:" not in out
    plan = make_plan(read_model(path), Request(parse_cards("4xV100-32")))
    assert plan.weights == 4096 * 4096 * 2 // 4 + 4096 * 4


def test_an_index_without_its_files_is_enough(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"model_type": "frobnicator"})
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 4 * GIB}, "weight_map": {}})
    )
    assert make_plan(read_model(path), Request(parse_cards("4xV100-32"))).weights == GIB


def test_json_has_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder(tmp_path / "m", FLASH_NEXT)), "--json", "--lengths", "1000", "2000"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["bytes_per_rank"].keys() >= {
        "experts",
        "dense",
        "embeddings",
        "buffers",
        "activations",
        "context",
        "graphs",
    }
    assert answer["host_bytes"] and answer["sequences"].keys() == {"1000", "2000"}
    assert [item["batch"] for item in answer["roofline"]] == [1, 8]


def test_a_cache_of_e4m3_bytes_holds_twice_the_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(folder(tmp_path / "m", QWEN3_32B))
    tokens = []
    for wanted in ("auto", "fp8"):
        written = tmp_path / f"{wanted}.json"
        assert main([model, "--json", "--kv-cache-dtype", wanted, "--write", str(written)]) == 0
        tokens.append(json.loads(capsys.readouterr().out)["kv_cache"]["tokens"])
        assert json.loads(written.read_text())["engine"]["kv_cache_dtype"]["value"] == wanted
    assert abs(tokens[1] - 2 * tokens[0]) <= 2 * 16


def test_a_narrower_cache_is_an_advice(tmp_path: Path) -> None:
    files = read_model(folder(tmp_path / "m", QWEN3_32B))
    plan = make_plan(files, Request(parse_cards("4xV100-32"), max_model_len=1))
    longest = plan.kv_tokens
    assert longest is not None
    advice = advise(
        files, make_plan(files, Request(parse_cards("4xV100-32"), max_model_len=longest * 3 // 2))
    )
    assert any("kv_cache_dtype fp8" in item.text and item.plan.request.kv_bytes == 1 for item in advice)


BAD = [
    ({}, [], "hidden_size is missing", None),
    ({"hidden_size": "x"}, [], "hidden_size: got 'x'", QWEN3_32B),
    ({"num_attention_heads": 0}, [], "num_attention_heads: got 0", QWEN3_32B),
    ({}, ["--gpus", "0xV100-32"], "got 0 cards", QWEN3_32B),
    ({}, ["--gpus", "4xV200"], "'V200' is not a card known here", QWEN3_32B),
    ({}, ["--gpus", "many"], "is not a card known here", QWEN3_32B),
    ({}, ["--gpus", "four V100"], "the form is COUNTxCARD", QWEN3_32B),
    ({}, ["--gpus", "3xV100-32"], "which 3 ranks cannot share", QWEN3_32B),
    ({}, ["--kv-cache-dtype", "fp8"], "--kv-cache-dtype: got fp8 for qwen4_exp_text on V100-32", FLASH_NEXT),
    ({}, ["--max-model-len", "0"], "--max-model-len: got 0", QWEN3_32B),
    ({}, ["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization: got 1.5", QWEN3_32B),
    ({}, ["--write", "/no/such/folder/p.json"], "--write /no/such/folder/p.json", QWEN3_32B),
]


@pytest.mark.parametrize(("changes", "argv", "message", "base"), BAD)
def test_bad_input_is_one_line(
    changes: Any, argv: list[str], message: str, base: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(
        tmp_path / "m",
        {**(base or {"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 2}), **changes},
    )
    assert main([str(path), *argv]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing"),
        ("{", "is not JSON"),
        ("[]", "a JSON object is needed"),
        ('{"model_type": 5}', "is not known here"),
    ],
)
def test_bad_config(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(PlanError, match=message):
        make_plan(read_model(tmp_path), Request(parse_cards("H200")))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 1 << 60),
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 10) + b'{"a": {}} ',
    ],
)
def test_damaged_safetensors(data: bytes, tmp_path: Path) -> None:
    folder(tmp_path, QWEN3_32B)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(PlanError, match=r"model\.safetensors"):
        read_model(tmp_path)


def test_a_broken_pattern_in_the_exclusions_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="re:\\("):
        plan_for(
            tmp_path / "m", {**QWEN3_32B, "quantization_config": {"quant_algo": "NVFP4", "ignore": ["re:("]}}
        )
