"""`voltriton gguf2hf`: families, tokenizers, quantised kinds, split files, bad files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_tiny import LINEARS
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from voltriton.checkpoint import convert
from voltriton.checkpoint.gguf import main, unpermutation

BYTES = [chr(b) if 33 <= b <= 126 else f"Ā{b}" for b in range(256)]
LEAVES = {
    "attn_q": (64, 64),
    "attn_k": (32, 64),
    "attn_v": (32, 64),
    "attn_output": (64, 64),
    "ffn_gate": (128, 64),
    "ffn_up": (128, 64),
    "ffn_down": (64, 128),
}
NORMS = {
    "llama": {"attn_norm": 64, "ffn_norm": 64},
    "qwen2": {"attn_norm": 64, "ffn_norm": 64},
    "qwen3": {"attn_norm": 64, "ffn_norm": 64, "attn_q_norm": 16, "attn_k_norm": 16},
    "gemma3": {
        "attn_norm": 64,
        "ffn_norm": 64,
        "attn_q_norm": 16,
        "attn_k_norm": 16,
        "post_attention_norm": 64,
        "post_ffw_norm": 64,
    },
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def byte_level_vocabulary() -> list[str]:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*letters, "he", "ll", "hell", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def add_bpe(writer: GGUFWriter, pre: str = "gpt-2") -> None:
    tokens = byte_level_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 3) + [3] * 3)
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(len(tokens) - 3)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(TEMPLATE)


def sentencepiece_vocabulary(family: str) -> list[str]:
    special = ["<unk>", "<s>", "</s>"]
    if family == "gemma3":  # all of Gemma's own: transformers adds those that are missing
        special = ["<unk>", "<bos>", "<eos>", "<pad>", "<mask>"]
    return [*special, *(f"<0x{b:02X}>" for b in range(256)), "▁", *"helo wrd", "he", "ll", "▁w"]


def add_sentencepiece(writer: GGUFWriter, family: str) -> None:
    pieces = sentencepiece_vocabulary(family)
    special, letters = pieces.index("<0x00>"), pieces.index("▁")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * letters + [-float(i) for i in range(len(pieces) - letters)])
    writer.add_token_types([2] + [3] * (special - 1) + [6] * 256 + [1] * (len(pieces) - letters))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)


def weights_of(family: str, vocabulary: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    out = {
        "token_embd.weight": rng.standard_normal((vocabulary, 64)) * 0.5,
        "output_norm.weight": rng.random(64),
    }
    for i in range(2):
        out |= {f"blk.{i}.{n}.weight": rng.standard_normal(s) * 0.1 for n, s in LEAVES.items()}
        out |= {f"blk.{i}.{n}.weight": rng.random(s) + 0.5 for n, s in NORMS[family].items()}
        if family == "qwen2":
            out |= {
                f"blk.{i}.{n}.bias": rng.standard_normal(LEAVES[n][0]) for n in ("attn_q", "attn_k", "attn_v")
            }
    return {name: w.astype(np.float32) for name, w in out.items()}


def write_gguf(
    path: Path,
    family: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    spm: bool | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    pre: str = "gpt-2",
) -> dict[str, np.ndarray[Any, Any]]:
    writer = GGUFWriter(str(path), family)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if family == "gemma3":
        writer.add_sliding_window(32)
    spm = family == "gemma3" if spm is None else spm
    add_sentencepiece(writer, family) if spm else add_bpe(writer, pre)
    vocabulary = len(sentencepiece_vocabulary(family) if spm else byte_level_vocabulary())
    weights = weights_of(family, vocabulary) | (extra or {})
    for name, value in weights.items():
        stored = quantize(value, kind) if value.ndim == 2 else value
        writer.add_tensor(name, stored, raw_dtype=kind if value.ndim == 2 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def to_folder(gguf: Path, out: Path, *options: str) -> dict[str, torch.Tensor]:
    assert main([str(gguf), str(out), *options]) == 0
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("family", NORMS)
def test_families_load_in_transformers_and_compute(family: str, tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf", family)
    made = to_folder(tmp_path / "m.gguf", tmp_path / "a folder", "--dtype", "float32")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "a folder", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    logits = model(torch.tensor([[1, 2, 3, 4]])).logits
    assert logits.shape == (1, 4, weights["token_embd.weight"].shape[0])
    assert torch.isfinite(logits).all()
    gain = made["model.layers.0.input_layernorm.weight"].numpy() + (1.0 if family == "gemma3" else 0.0)
    np.testing.assert_allclose(gain, weights["blk.0.attn_norm.weight"], rtol=1e-6)
    same = made["model.layers.1.mlp.down_proj.weight"].numpy()
    np.testing.assert_array_equal(same, weights["blk.1.ffn_down.weight"])
    config = AutoConfig.from_pretrained(tmp_path / "a folder")
    assert config.tie_word_embeddings
    assert config.head_dim == 16


def test_rotary_order_of_llama_is_undone(tmp_path: Path) -> None:
    """llama.cpp's own permutation (convert_hf_to_gguf.py, LlamaModel.permute), applied and taken back."""
    heads, width = 4, 16
    original = np.arange(heads * width)
    permuted = original.reshape(heads, 2, width // 2).swapaxes(1, 2).reshape(-1)
    assert (permuted[unpermutation(len(original), heads)] == original).all()
    weights = write_gguf(tmp_path / "m.gguf")
    made = to_folder(tmp_path / "m.gguf", tmp_path / "out", "--dtype", "float32")
    key = weights["blk.0.attn_k.weight"][unpermutation(32, 2)]
    np.testing.assert_array_equal(made["model.layers.0.self_attn.k_proj.weight"].numpy(), key)


KINDS = [
    k for k in GGMLQuantizationType if k.name[:2] in ("Q2", "Q3", "Q4", "Q5", "Q6", "Q8", "IQ", "F1", "BF")
]


@pytest.mark.parametrize("kind", [k for k in KINDS if k.name not in ("Q8_1", "Q8_K")], ids=lambda k: k.name)
def test_every_quantised_kind_is_expanded(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    """K-quants cannot be made by the package: any bytes with small half-precision scales are valid blocks."""
    size, nbytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 0x3C, (128, 256 // size * nbytes), dtype=np.uint8)
    try:
        expected = dequantize(raw, kind)
    except NotImplementedError:
        assert not kind.name.endswith("_K")
        pytest.skip(f"the gguf package cannot expand {kind.name}")
    writer = GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    keys = {"context_length": 64, "embedding_length": 256, "block_count": 1, "feed_forward_length": 128}
    for name, value in (keys | {"attention.head_count": 4}).items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    add_bpe(writer)
    shapes = {"attn_q": (256, 256), "attn_k": (256, 256), "attn_v": (256, 256), "attn_output": (256, 256)}
    shapes |= {"ffn_up": (128, 256), "ffn_down": (256, 128), "attn_norm": (256,), "ffn_norm": (256,)}
    shapes = {f"blk.0.{n}.weight": s for n, s in shapes.items()} | {"output_norm.weight": (256,)}
    for name, shape in (shapes | {"token_embd.weight": (262, 256)}).items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.add_tensor("blk.0.ffn_gate.weight", raw, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    made = to_folder(tmp_path / "m.gguf", tmp_path / "out", "--dtype", "float32")
    np.testing.assert_array_equal(made["model.layers.0.mlp.gate_proj.weight"].numpy(), expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_byte_level_tokenizer_template_and_ends(family: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", family)
    to_folder(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "hello, 世界 2024 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("hello")[0] == "hell"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer("<|im_end|>")["input_ids"] == [len(tokenizer) - 1]
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert set(ends) == {len(tokenizer) - 1, len(tokenizer) - 3}


def test_smollm_splits_digits(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", pre="smollm")
    to_folder(tmp_path / "m.gguf", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").tokenize("2024") == ["2", "0", "2", "4"]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sentencepiece_tokenizer_adds_bos(family: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", family, spm=True)
    to_folder(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("hello wörld")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "hello wörld"


def test_two_copies_of_the_embedding_are_tied_and_two_matrices_are_not(tmp_path: Path) -> None:
    first = weights_of("llama", len(byte_level_vocabulary()))["token_embd.weight"]
    write_gguf(tmp_path / "tied.gguf", extra={"output.weight": first * 1.01})
    assert "lm_head.weight" not in to_folder(tmp_path / "tied.gguf", tmp_path / "tied")
    write_gguf(tmp_path / "untied.gguf", extra={"output.weight": first[::-1].copy()})
    assert "lm_head.weight" in to_folder(tmp_path / "untied.gguf", tmp_path / "untied")
    assert json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"] is False


def test_llama3_rope_factors_are_recovered(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)})
    to_folder(tmp_path / "m.gguf", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"]["factor"] == 8.0


def test_split_files(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", "qwen2")
    parts = [tmp_path / f"s-0000{i}-of-00002.gguf" for i in (1, 2)]
    write_gguf(parts[0], "qwen2")
    first = to_folder(tmp_path / "m.gguf", tmp_path / "whole")
    # The second part: a file with tensors and no metadata but its place, as llama.cpp's gguf-split writes it.
    writer = GGUFWriter(str(parts[1]), "qwen2")
    writer.add_uint16("split.no", 1)
    writer.add_tensor("blk.1.ffn_up.weight", whole["blk.1.ffn_up.weight"] * 2)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    made = to_folder(parts[1], tmp_path / "split")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(made[name], first[name] * 2)
    assert torch.equal(made["model.norm.weight"], first["model.norm.weight"])


def test_a_link_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    write_gguf(tmp_path / "blobs" / "0123abcd")
    (tmp_path / "m.gguf").symlink_to(tmp_path / "blobs" / "0123abcd")
    assert "model.norm.weight" in to_folder(tmp_path / "m.gguf", tmp_path / "out")


def test_convert_takes_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen3", GGMLQuantizationType.Q8_0)
    assert convert.main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 0
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(name.endswith("weight_packed") for name in made) == 2 * len(LINEARS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "out"]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5000)


def cut_metadata(path: Path) -> None:
    os.truncate(path, 600)


def break_a_token(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"<|im_start|>", b"<|im_\xff\xfert|>"))


def break_the_width(path: Path) -> None:
    content = bytearray(path.read_bytes())
    key = b"llama.feed_forward_length"
    place = content.index(key) + len(key) + 4  # behind the type of the value
    content[place : place + 4] = (65).to_bytes(4, "little")
    path.write_bytes(content)


def no_width(path: Path) -> None:
    content = bytearray(path.read_bytes())
    key = b"llama.embedding_length"
    place = content.index(key) + len(key) + 4
    content[place : place + 4] = bytes(4)
    path.write_bytes(content)


def poison(path: Path) -> None:
    write_gguf(path, extra={"blk.1.ffn_up.weight": np.full((128, 64), np.nan, np.float32)})


BAD = {
    "token that is no UTF-8": (break_a_token, "damaged"),
    "width of another model": (break_the_width, "the configuration says"),
    "no width": (no_width, "hidden_size 0"),
    "NaN": (poison, "blk.1.ffn_up.weight: NaN"),
    "cut off": (cut, "cut off"),
    "cut metadata": (cut_metadata, "cut off"),
    "no GGUF": (lambda p: p.write_bytes(b"PK\x03\x04" * 500), "not a GGUF file"),
    "empty": (lambda p: p.write_bytes(b""), "not a GGUF file"),
    "missing": (lambda p: p.unlink(), "is no file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, text = BAD[case]
    write_gguf(tmp_path / "m.gguf")
    damage(tmp_path / "m.gguf")
    refused(tmp_path, capsys, tmp_path / "m.gguf", text)


@pytest.mark.parametrize(("family", "spm"), [("qwen2", True), ("qwen3", True), ("gemma3", False)])
def test_tokenizer_kind_of_another_family(
    family: str, spm: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "m.gguf", family, spm=spm)
    refused(tmp_path, capsys, tmp_path / "m.gguf", f"is not handled for {family}")


def test_unknown_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    writer.add_tensor("x", np.zeros(4, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    refused(tmp_path, capsys, tmp_path / "m.gguf", "'mamba' is not handled")


def test_unknown_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "m.gguf", extra={"blk.0.ssm_a.weight": np.ones(4, np.float32)})
    refused(tmp_path, capsys, tmp_path / "m.gguf", "blk.0.ssm_a.weight is not known")


def test_part_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "s-00001-of-00003.gguf")
    refused(tmp_path, capsys, tmp_path / "s-00001-of-00003.gguf", "s-00002-of-00003.gguf of this split file")


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], gguf: Path, text: str) -> None:
    capsys.readouterr()
    assert main([str(gguf), str(tmp_path / "out")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert text in lines[0]
    assert not [p for p in tmp_path.iterdir() if "out" in p.name]
