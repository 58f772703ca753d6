"""Tiny random checkpoints (Qwen3, Qwen3-MoE, Qwen3-Next, qwen4_exp) in every NVFP4 layout that vLLM reads.

`make(folder, arch)` writes, under `folder`:
    deq                    the dequantised weights in float32: the reference
    mo_w4a4 mo_w4a16       ModelOpt (weight, weight_scale, weight_scale_2[, input_scale])
    mo_legacy              the same as mo_w4a4, with its configuration in hf_quant_config.json
    ct_w4a4 ct_w4a16       compressed-tensors (weight_packed, weight_scale, weight_global_scale[, input_...])
All hold the same quantised values, so all must give the logits of `deq`.
"""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from kept import KEPT
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LARGEST = 6 * 448  # of e2m1 times E4M3
INPUT_LARGEST = 24.0  # stands for a calibration of the activations
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
LAYOUTS = ("mo_w4a4", "mo_w4a16", "mo_legacy", "ct_w4a4", "ct_w4a16")


def make(folder: Path, arch: str, unequal: bool = False, **config: Any) -> Path:
    """unequal: the parts of fused layers get global scales that differ by a factor of three."""
    base = folder / "base"
    base.mkdir(parents=True)
    _tokenizer(base)
    model = _model(arch, config)
    _disturb(model, unequal)
    model.float().save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    linear = [name for name, t in tensors.items() if _is_quantised(arch, name) and t.ndim == 2]
    largest = _largest(tensors, linear, () if unequal else FUSED)
    deq, mo, ct = _quantise_all(tensors, largest)
    _write(folder, arch, deq, mo, ct, [name.removesuffix(".weight") for name in linear])
    return folder


def overflowing(checkpoint: Path, out: Path) -> Path:
    """A copy of a ModelOpt checkpoint whose second down_proj multiplies beyond 65504."""
    shutil.copytree(checkpoint, out)
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight_scale_2"] *= 1e5
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _is_quantised(arch: str, name: str) -> bool:
    module = name.removesuffix(".weight")
    kept = any(fnmatch(module, f"*.{pattern}") for pattern in KEPT[arch])
    return name.endswith("_proj.weight") and not kept


def quantise(weight: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Packed uint8 [N, K/2], block scale E4M3 [N, K/16], global scale (a multiplier), dequantised weight."""
    n, k = weight.shape
    factor = (largest / LARGEST).float()
    blocks = weight.float().reshape(n, k // 16, 16)
    scale = (blocks.abs().amax(-1) / 6 / factor).clamp(max=448).to(torch.float8_e4m3fn)
    step = scale.float() * factor
    ratio = blocks / torch.where(step == 0, torch.ones_like(step), step)[..., None]
    nearest = (ratio.abs()[..., None] - E2M1).abs().argmin(-1)
    code = (nearest + 8 * (ratio < 0)).to(torch.uint8).reshape(n, k)
    values = torch.where(code >= 8, -E2M1[(code & 7).long()], E2M1[(code & 7).long()])
    deq = (values.reshape(n, k // 16, 16) * step[..., None]).reshape(n, k)
    return (code[:, 0::2] | (code[:, 1::2] << 4)).contiguous(), scale, factor, deq


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world this is a test of the tokenizer"] * 10, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)


# Gated DeltaNet on three of four layers.
GDN: dict[str, Any] = {
    "shared_expert_intermediate_size": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# The sizes that kernels are made for (heads, rotary part, ratio) are those of the real model.
QWEN4_EXP: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "output_gate_type": "silu",
    "hc_count": 4,
    "hc_lowrank": 64,
    "ple_layer_ids": [2],
    "ple_embed_dim": 256,
    "ngram_vocab_size_base": 1000,
    "split_ngram_parts": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}


def _model(arch: str, config: dict[str, Any]) -> torch.nn.Module:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.08,
    } | config
    torch.manual_seed(0)
    if arch == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    moe: dict[str, Any] = {
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }
    if arch == "qwen3_moe":
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(moe | sizes)))
    if arch == "qwen3_next":
        return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**(moe | GDN | sizes)))
    text = transformers.Qwen4ExpTextConfig(
        **(moe | GDN | QWEN4_EXP | sizes | {"num_hidden_layers": 4} | config)
    )
    return transformers.Qwen4ExpForCausalLM(text)


def _disturb(model: torch.nn.Module, unequal: bool) -> None:
    """Norm weights away from one, and parts of fused layers of unequal size."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
        if unequal and ("k_proj" in name or "up_proj" in name):
            half = parameter.shape[1] // 2 if name.endswith("gate_up_proj") else 0
            (parameter.data[:, half:] if half else parameter.data).mul_(3.0)


def _largest(tensors: Tensors, linear: list[str], fused: tuple[tuple[str, ...], ...]) -> Tensors:
    """Largest magnitude of each matrix; one for all parts of a fused layer, as real exporters write it."""
    largest = {name: tensors[name].abs().max() for name in linear}
    for group in fused:
        for name in linear:
            stem = name.removesuffix(".weight")
            if stem.endswith(group[0]):
                parts = [stem.removesuffix(group[0]) + part + ".weight" for part in group]
                common = torch.stack([largest[part] for part in parts]).max()
                largest.update(dict.fromkeys(parts, common))
    return largest


def _quantise_all(tensors: Tensors, largest: Tensors) -> tuple[Tensors, Tensors, Tensors]:
    deq: Tensors = {}
    mo: Tensors = {}
    ct: Tensors = {}
    for name, tensor in tensors.items():
        if name not in largest:
            for target in (deq, mo, ct):
                target[name] = tensor.clone()
            continue
        packed, scale, factor, deq[name] = quantise(tensor, largest[name])
        stem = name.removesuffix(".weight")
        mo |= {f"{stem}.weight": packed, f"{stem}.weight_scale": scale}
        mo |= {f"{stem}.weight_scale_2": factor.reshape(())}
        ct |= {f"{stem}.weight_packed": packed.clone(), f"{stem}.weight_scale": scale.clone()}
        ct |= {f"{stem}.weight_global_scale": (1 / factor).reshape(1)}
    return deq, mo, ct


def _write(folder: Path, arch: str, deq: Tensors, mo: Tensors, ct: Tensors, stems: list[str]) -> None:
    kept = ["lm_head", *(f"model.layers.*.{pattern}" for pattern in KEPT[arch])]
    mo_inputs = {f"{stem}.input_scale": torch.tensor(INPUT_LARGEST / LARGEST) for stem in stems}
    ct_inputs = {f"{stem}.input_global_scale": torch.tensor([LARGEST / INPUT_LARGEST]) for stem in stems}
    _checkpoint(folder, "deq", deq, {})
    _checkpoint(folder, "mo_w4a4", mo | mo_inputs, _modelopt("NVFP4", kept))
    _checkpoint(folder, "mo_w4a16", mo, _modelopt("W4A16_NVFP4", kept))
    _checkpoint(folder, "mo_legacy", mo | mo_inputs, {})
    legacy = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": kept,
    }
    config = {"producer": {"name": "modelopt", "version": "0.33"}, "quantization": legacy}
    (folder / "mo_legacy/hf_quant_config.json").write_text(json.dumps(config))
    _checkpoint(folder, "ct_w4a4", ct | ct_inputs, _compressed_tensors(True, KEPT[arch]))
    _checkpoint(folder, "ct_w4a16", ct, _compressed_tensors(False, KEPT[arch]))


def _modelopt(algorithm: str, kept: list[str]) -> dict[str, Any]:
    producer = {"name": "tiny", "version": "0"}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "group_size": 16,
        "ignore": kept,
        "producer": producer,
    }


def _compressed_tensors(inputs: bool, kept: tuple[str, ...]) -> dict[str, Any]:
    def numbers(dynamic: bool | str) -> dict[str, Any]:
        fixed = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        return fixed | {"symmetric": True, "dynamic": dynamic, "observer": "minmax"}

    group = {
        "targets": ["Linear"],
        "weights": numbers(False),
        "input_activations": numbers("local") if inputs else None,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(f"re:.*{pattern.replace('*', '.*')}$" for pattern in kept)],
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
    }


def _checkpoint(folder: Path, name: str, tensors: Tensors, quantisation: dict[str, Any]) -> None:
    target = folder / name
    target.mkdir()
    for file in (folder / "base").glob("*.json"):
        shutil.copy(file, target)
    config = json.loads((target / "config.json").read_text())
    config["dtype"] = "float32" if name == "deq" else "bfloat16"
    if quantisation:
        config["quantization_config"] = quantisation
    (target / "config.json").write_text(json.dumps(config, indent=1))
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, target / "model.safetensors", metadata={"format": "pt"})
