"""The demo model's greedy answers, through tritonserver and the real engine, against its own 16-bit weights.

Stated tolerances. The 16-bit model must find the NVFP4 answers likely (perplexity of each at most 8, where its
own greedy answers have below 3 and text of another kind some 30), the words of both must overlap (mean F1 of
words over the questions at least 0.3; two unrelated answers share some 0.1), and the fact must be right.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import make_tiny
import pytest
import torch
from reference import with_the_same_numbers
from server import Server
from test_engine_nvfp4 import check, results
from voltriton.checkpoint.codec import Rule
from voltriton.checkpoint.convert import Options, convert
from voltriton.checkpoint.source import Source
from voltriton.checkpoint.texts import load_tokenizer
from voltriton.checkpoint.verify import expanded_model
from voltriton.triton import default_root
from wire_client import ask

# The server's start is within the first test's time, and takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)

HF = default_root() / "models" / "smollm2-hf"
TOKENS = 32
MOST_PERPLEXITY = 8.0
LEAST_OVERLAP = 0.3
QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "What is a computer?",
    "Name three colours of the rainbow.",
    "What do cats like to eat?",
]


class Reference:
    """The 16-bit model in float32."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.tokenizer = load_tokenizer(HF)
        self.model: Any = expanded_model(Source(HF))

    def prompt(self, question: str) -> torch.Tensor:
        chat = [{"role": "user", "content": question}]
        given = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids: torch.Tensor = given["input_ids"]
        return ids

    def answer(self, question: str) -> str:
        ids = self.prompt(question)
        with torch.no_grad():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
            )
        text: str = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return text

    def perplexity(self, question: str, answer: str) -> float:
        ids = self.prompt(question)
        told = self.tokenizer(answer, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = self.model(torch.cat([ids, told], 1)).logits[0, ids.shape[1] - 1 : -1]
        return math.exp(torch.nn.functional.cross_entropy(logits, told[0]).item())


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


def overlap(one: str, other: str) -> float:
    """F1 of the words of two texts."""
    a, b = words(one), words(other)
    return 2 * (a & b).total() / max(a.total() + b.total(), 1)


@pytest.fixture(scope="module")
def reference() -> Reference:
    if not (HF / "config.json").exists():
        pytest.fail(
            "the 16-bit demo model is not there: .venv/bin/voltriton fetch smollm2 (scripts/test does it)"
        )
    return Reference()


@pytest.fixture(scope="module")
def answers(server: Server) -> dict[str, str]:
    """The served model's greedy answers."""
    parameters = {"temperature": 0, "max_tokens": TOKENS}
    found = {}
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        found[question] = ask(
            server.grpc_url, messages=messages, stream=True, sampling_parameters=parameters
        ).text
    return found


def test_answers_are_likely_under_the_16_bit_model(answers: dict[str, str], reference: Reference) -> None:
    perplexities = {q: reference.perplexity(q, answer) for q, answer in answers.items()}
    print(perplexities)
    assert max(perplexities.values()) <= MOST_PERPLEXITY, perplexities


def test_answers_overlap_with_those_of_the_16_bit_model(
    answers: dict[str, str], reference: Reference
) -> None:
    overlaps = {q: overlap(answer, reference.answer(q)) for q, answer in answers.items()}
    print(overlaps)
    assert sum(overlaps.values()) / len(overlaps) >= LEAST_OVERLAP, overlaps


def test_the_fact_is_right(answers: dict[str, str]) -> None:
    assert "Paris" in answers[QUESTIONS[0]]


LOADED = [
    ("qwen3", Rule.COMPRESSED_TENSORS),
    ("qwen3", Rule.MODELOPT),
    ("qwen3_moe", Rule.COMPRESSED_TENSORS),
]


def test_the_engine_reads_the_numbers_that_were_written(tmp_path: Path) -> None:
    """vLLM on our checkpoints of tiny random models against Hugging Face on the same numbers, float32."""
    checkpoints, plain = [], []
    for arch in {arch for arch, _ in LOADED}:
        make_tiny.make(tmp_path / arch, arch)
    for arch, rule in LOADED:
        base, out = tmp_path / arch / "base", tmp_path / f"{arch}-{rule}"
        convert(base, out, Options(rule, scales="mse"))
        checkpoints.append(out)
        plain.append(with_the_same_numbers(out, base, tmp_path / f"{arch}-{rule}-plain"))
    wanted = results("hf", tmp_path / "hf.pt", {}, *plain)
    found = results("vllm", tmp_path / "vllm.pt", {"dtype": "float32"}, *checkpoints)
    for reference, ours in zip(wanted, found, strict=True):
        check(reference, ours)
