"""`voltriton verify CKPT`: is an NVFP4 checkpoint whole, and how far is it from its source?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from voltriton.checkpoint.comparison import layer_errors, passed, quality
from voltriton.checkpoint.errors import CheckpointError, at_least, run_command
from voltriton.checkpoint.inspection import Check, inspect, tensor_parallel
from voltriton.checkpoint.layers import FAMILIES, empty_model
from voltriton.checkpoint.progress import step
from voltriton.checkpoint.report import Report
from voltriton.checkpoint.source import Source
from voltriton.checkpoint.texts import load_tokenizer, windows

CHAT_TOKENS = 24
QUESTIONS = ("What is the capital of France?", "Count from one to five.")


def verify(args: argparse.Namespace) -> Report:
    checkpoint, checks = inspect(args.checkpoint)
    report = Report(str(args.checkpoint), str(args.against) if args.against else None, checks)
    if checkpoint is None or report.faults:
        return report
    report.parallel = tensor_parallel(checkpoint)
    if args.against:
        _compare(report, checkpoint, Source(args.against), args)
    if not args.no_chat:
        _chat(report, checkpoint)
    return report


def _compare(report: Report, checkpoint: Source, source: Source, args: argparse.Namespace) -> None:
    with step(f"comparing weights with {source.path}"):
        report.layers = list(layer_errors(checkpoint, source))
    if not args.text:
        return
    report.texts = [str(t) for t in args.text]
    given = windows(load_tokenizer(source.path), args.text, args.tokens, args.window, args.seed)
    with step(f"predicting {len(given) * args.window} tokens with both"):
        report.quality = q = quality(checkpoint, passed(source, given), given)
    limits = [
        (
            "perplexity",
            f"{q.increase:+.1%}, at most {args.max_increase:+.1%}",
            q.increase <= args.max_increase,
        ),
        (
            "same most likely token",
            f"{q.agreement:.1%}, at least {args.min_agreement:.1%}",
            q.agreement >= args.min_agreement,
        ),
    ]
    for name, text, good in limits:
        report.checks.append(Check(name, note=text) if good else Check(name, fault=text))


def _chat(report: Report, checkpoint: Source) -> None:
    """Greedy answers of the expanded model, where it is small enough: that they are text, not that they are right."""
    values = sum(w.spec.nbytes // w.spec.dtype.itemsize for w in map(checkpoint.matrix, checkpoint.names))
    tokenizer = load_tokenizer(checkpoint.path)
    too_large = values * 8 > available_memory()
    reasons = {
        "the family is not handled here": str(checkpoint.config.get("model_type")) not in FAMILIES,
        "there is no chat template": tokenizer.chat_template is None,
        "float32 weights would take over half the free memory": too_large,
    }
    reason = next((text for text, true in reasons.items() if true), None)
    if reason is not None:
        report.notes.append(f"no chat smoke test: {reason}")
        return
    report.chat = chat_answers(checkpoint, QUESTIONS, CHAT_TOKENS)
    dull = [q for q, answer in report.chat if len(set(answer.split())) < 2]
    fault = f"no sensible answer to {dull[0]!r}" if dull else ""
    report.checks.append(Check("chat smoke test", fault, f"{len(report.chat)} answers"))


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kb = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return kb * 1024


@torch.no_grad()
def chat_answers(source: Source, questions: tuple[str, ...], tokens: int) -> list[tuple[str, str]]:
    tokenizer = load_tokenizer(source.path)
    model = expanded_model(source)
    answers = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        given = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        out = model.generate(**given, max_new_tokens=tokens, do_sample=False)
        text = tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
        answers.append((question, text.strip()))
    return answers


def expanded_model(source: Source) -> Any:
    """The whole model in float32, transformers' code with our numbers."""
    model = empty_model(source)
    rotary = type(model.model.rotary_emb)(config=model.config)
    embed = model.model.embed_tokens
    scale = getattr(embed, "scalar_embed_scale", None)
    model.to_empty(device="cpu")
    model.model.rotary_emb = rotary
    if scale is not None:
        embed.embed_scale = torch.tensor(scale)
    model.tie_weights()
    for name, parameter in model.named_parameters():
        weight = source.matrix(name)
        parameter.requires_grad_(False).copy_(weight.rows(0, weight.spec.shape[0]))
    return model.eval()


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="voltriton verify", description=__doc__)
    p.add_argument("checkpoint", type=Path, metavar="CKPT")
    p.add_argument("--against", type=Path, metavar="SRC", help="the 16-bit folder it was made from")
    p.add_argument(
        "--text", type=Path, action="append", default=[], metavar="FILE", help="predict this text with both"
    )
    p.add_argument(
        "--tokens", type=at_least(2), default=4096, metavar="N", help="of the text; default %(default)s"
    )
    p.add_argument("--window", type=at_least(2), default=512, metavar="N", help="default %(default)s")
    p.add_argument("--seed", type=int, default=1, help="which parts of the text; default %(default)s")
    p.add_argument(
        "--max-increase",
        type=float,
        default=0.3,
        metavar="X",
        help="of perplexity, 0.3 = 30 %%; default %(default)s",
    )
    p.add_argument(
        "--min-agreement",
        type=float,
        default=0.6,
        metavar="X",
        help="of most likely tokens; default %(default)s",
    )
    p.add_argument("--no-chat", action="store_true", help="leave the chat smoke test out")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    p.add_argument("--html", type=Path, metavar="FILE", help="write the report with plots there too")
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)

    def action() -> None:
        if args.text and not args.against:
            raise CheckpointError("--text needs --against: quality is measured against the source")
        report = verify(args)
        print(report.as_text())
        if args.json:
            args.json.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
        if args.html:
            args.html.write_text(report.as_html(), encoding="utf-8")
        if report.faults:
            raise CheckpointError(report.faults[0])

    return run_command("verify", action)
