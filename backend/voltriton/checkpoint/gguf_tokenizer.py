"""The tokenizer inside a GGUF file -> a Hugging Face tokenizer, without network."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

from voltriton.checkpoint.errors import CheckpointError

# Which kinds (tokenizer.ggml.model: gpt2 is byte-level BPE, llama is SentencePiece) transformers builds right for which
# family; for others it silently builds one that loses characters.
KINDS = {"llama": ("gpt2", "llama"), "qwen2": ("gpt2",), "qwen3": ("gpt2",), "gemma3": ("llama",)}


def build_tokenizer(gguf: Path, meta: dict[str, Any], chat_template: str | None) -> Any:
    """A PreTrainedTokenizerFast. Raises CheckpointError for a kind that transformers does not know."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # a path that looks like a repository name would be asked for online
    from transformers import PreTrainedTokenizerFast

    family, kind = meta["general.architecture"], meta.get("tokenizer.ggml.model")
    if kind not in KINDS[family]:
        known = ", ".join(KINDS[family])
        raise CheckpointError(
            f"{gguf}: tokenizer kind {kind!r} is not handled for {family}; handled: {known}"
        )
    backend = _backend(gguf, meta)
    tokens = meta["tokenizer.ggml.tokens"]

    def token(kind: str) -> str | None:
        index = meta.get(f"tokenizer.ggml.{kind}_token_id")
        return None if index is None else tokens[index]

    _add_bos(backend, token("bos"), meta)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=token("bos"),
        eos_token=token("eos"),
        pad_token=token("padding"),
        unk_token=token("unknown"),
        model_max_length=meta[f"{meta['general.architecture']}.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template or meta.get("tokenizer.chat_template")
    return tokenizer


def _backend(gguf: Path, meta: dict[str, Any]) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
            loaded = AutoTokenizer.from_pretrained(str(gguf.absolute().parent), gguf_file=gguf.name)
    except Exception as error:
        kind = meta.get("tokenizer.ggml.model")
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{gguf}: its tokenizer of kind {kind!r} cannot be built: {reason}") from error
    backend = loaded.backend_tokenizer
    if meta.get("tokenizer.ggml.pre") == "smollm":
        # transformers 5.19 knows no split for "smollm" and falls back to GPT-2's, which keeps 2024 in one
        # piece; the model was trained on single digits.
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return backend


def _add_bos(backend: Any, bos: str | None, meta: dict[str, Any]) -> None:
    """PreTrainedTokenizerFast adds no BOS by itself, and Gemma writes nonsense without one."""
    from tokenizers import processors

    if bos is None or not meta.get("tokenizer.ggml.add_bos_token"):
        return
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, meta["tokenizer.ggml.bos_token_id"])],
    )
