"""`voltriton convert SRC OUT`: a model folder or GGUF file -> an NVFP4 checkpoint."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from voltriton.checkpoint.architectures import Choice, architecture_of, choose
from voltriton.checkpoint.calibrate import calibrate
from voltriton.checkpoint.codec import Rule, quantise
from voltriton.checkpoint.errors import CheckpointError, at_least, run_command
from voltriton.checkpoint.folder import ModelFolder, check_output
from voltriton.checkpoint.layout import legacy_config, quantisation_config, tensor_names, tensor_specs
from voltriton.checkpoint.progress import Meter, meter, step
from voltriton.checkpoint.rounding import Recipe
from voltriton.checkpoint.scales import max_scales, searched_scales
from voltriton.checkpoint.source import SIXTEEN_BIT, Nvfp4, Source, Weight, split_experts
from voltriton.checkpoint.tensors import Spec
from voltriton.checkpoint.tuning import Tuning

CHUNK_VALUES = 1 << 20  # weights in work at a time, a thread: 4 MB of float32, whatever the tensor's size
COPY_BYTES = 8 << 20


@dataclass(frozen=True)
class Options:
    layout: Rule = Rule.COMPRESSED_TENSORS
    scales: str = "max"
    include: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    jobs: int = 0
    input_scale: bool = False
    calibration: Recipe | None = None

    @property
    def threads(self) -> int:
        return self.jobs or len(os.sched_getaffinity(0))


def convert(source_path: Path, out: Path, options: Options) -> None:
    """Quantise a folder. Raises CheckpointError for what is wrong with it; `out` appears only when whole."""
    source = Source(source_path)
    if source.rule is options.layout:
        raise CheckpointError(f"{source_path} is NVFP4 in the {options.layout} layout already: nothing to do")
    check_output(out)
    job = _Relayout(source, options) if source.nvfp4 else _Quantise(source, options)
    identity = json.dumps([str(source_path.resolve()), _stamps(source), _plain(options)])
    with ModelFolder(out, job.specs(), identity) as folder:
        if isinstance(job, _Quantise) and options.calibration is not None:
            recipe, threads = options.calibration, options.threads
            calibrate(source, job.groups, folder, options.layout, recipe, options.input_scale, threads)
        torch.set_num_threads(1)  # here the parallel unit is the tensor
        _run(job.tasks(folder), folder, options.threads, f"quantising {source_path.name}")
        _write_metadata(folder, source, options, job.kept(), job.input_scale)


def _plain(options: Options) -> dict[str, Any]:
    """What decides the bytes of the result, for the journal: the texts count by size and time too."""
    recipe = options.calibration
    texts = (
        [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in recipe.files] if recipe else []
    )
    return asdict(replace(options, jobs=0, calibration=replace(recipe, files=[]) if recipe else None)) | {
        "texts": texts
    }


def _stamps(source: Source) -> list[tuple[str, int, int]]:
    files = sorted({t.path for t in source.stored.values()})
    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]


@dataclass(frozen=True)
class Task:
    """A piece of work that completes the tensors `names`."""

    names: tuple[str, ...]
    nbytes: int
    run: Callable[[Meter], None]


def _run(tasks: list[Task], folder: ModelFolder, threads: int, what: str) -> None:
    todo = [t for t in tasks if not set(t.names) <= folder.done]
    with meter(what, sum(t.nbytes for t in todo)) as shown, ThreadPoolExecutor(threads) as pool:
        waiting = {pool.submit(task.run, shown): task for task in todo}
        try:
            for future in as_completed(waiting):
                future.result()
                folder.finish(*waiting[future].names)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class _Quantise:
    """16-bit or FP8 weights -> NVFP4."""

    def __init__(self, source: Source, options: Options):
        self._options = options
        self.input_scale = options.input_scale
        arch = architecture_of(source.config)
        self._weights = split_experts(source.weights) if arch.split_experts else source.weights
        specs = {name: weight.spec for name, weight in self._weights.items()}
        self._choice: Choice = choose(specs, arch, options.include, options.exclude)
        self.groups = self._choice.groups
        self._group = {m: members for members in self.groups.values() for m in members}
        for module in self._group:
            dtype = specs[f"{module}.weight"].dtype
            if dtype not in SIXTEEN_BIT:
                raise CheckpointError(
                    f"{module}.weight has dtype {dtype}: only floating-point weights can be NVFP4"
                )

    def kept(self) -> list[str]:
        return [m for m in self._choice.kept if "norm" not in m]

    def specs(self) -> list[Spec]:
        specs: list[Spec] = []
        for name, weight in self._weights.items():
            module = name.removesuffix(".weight")
            if module in self._group:
                specs += tensor_specs(module, weight.spec.shape, self._options.layout, self.input_scale)
            else:
                specs.append(weight.spec)
        return specs

    def tasks(self, folder: ModelFolder) -> list[Task]:
        calibrated = self._options.calibration is not None
        tasks = (
            [] if calibrated else [self._quantise_task(members, folder) for members in self.groups.values()]
        )
        for name, weight in self._weights.items():
            if name.removesuffix(".weight") not in self._group:
                tasks.append(copy_task(name, weight, folder))
        return sorted(tasks, key=lambda t: -t.nbytes)  # the largest first, so that no thread is left with it

    def _quantise_task(self, members: list[str], folder: ModelFolder) -> Task:
        weights = {m: self._weights[f"{m}.weight"] for m in members}
        names = [n for m in members for n in tensor_names(m, self._options.layout)[:3]]
        nbytes = sum(w.spec.nbytes for w in weights.values())
        return Task(tuple(names), nbytes, lambda shown: quantise_group(weights, folder, self._options, shown))


def quantise_group(weights: dict[str, Weight], folder: ModelFolder, options: Options, shown: Meter) -> None:
    """Quantise the matrices of one fused layer with one global scale; two passes over their rows."""
    amax = torch.zeros(())
    for module, weight in weights.items():
        for begin, end in row_ranges(weight):
            part = weight.rows(begin, end).abs().max()
            if not torch.isfinite(part):
                raise CheckpointError(
                    f"{module}.weight has NaN or infinite values in rows {begin} to {end - 1}"
                )
            amax = torch.maximum(amax, part)
            shown.add((end - begin) * weight.spec.row_bytes // 2)
    top = options.layout.global_scale(amax)
    choose_scales = searched_scales if options.scales == "mse" else max_scales
    for module, weight in weights.items():
        packed_name, scale_name, top_name, _ = tensor_names(module, options.layout)
        columns = weight.spec.shape[1]
        for begin, end in row_ranges(weight):
            rows = weight.rows(begin, end)
            scale = choose_scales(rows, top, options.layout)
            folder.write(packed_name, begin * columns // 2, quantise(rows, scale, top, options.layout))
            folder.write(scale_name, begin * columns // 16, scale)
            shown.add((end - begin) * weight.spec.row_bytes // 2)
        folder.write(top_name, 0, top)


def row_ranges(weight: Weight) -> list[tuple[int, int]]:
    rows, columns = weight.spec.shape
    multiple = weight.row_multiple
    size = max(CHUNK_VALUES // columns // multiple, 1) * multiple
    return [(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


def copy_task(name: str, weight: Weight, folder: ModelFolder) -> Task:
    """Copy a tensor as it is (an FP8 one that is kept becomes bfloat16)."""

    def run(shown: Meter) -> None:
        spec = weight.spec
        stored = getattr(weight, "stored", None)
        if stored is None:
            for begin, end in row_ranges(weight):
                folder.write(name, begin * spec.row_bytes, weight.rows(begin, end).to(spec.dtype))
        elif not spec.shape:
            folder.write(name, 0, stored.rows())
        elif spec.nbytes:
            size = max(COPY_BYTES // spec.row_bytes, 1)
            for begin in range(0, spec.shape[0], size):
                folder.write(
                    name, begin * spec.row_bytes, stored.rows(begin, min(begin + size, spec.shape[0]))
                )
        shown.add(spec.nbytes)

    return Task((name,), weight.spec.nbytes, run)


class _Relayout:
    """NVFP4 -> the other layout: the values and block scales stay byte for byte, the global scale inverts."""

    def __init__(self, source: Source, options: Options):
        self._source, self._options = source, options
        self.input_scale = all(w.input_scale is not None for w in source.nvfp4.values())

    def kept(self) -> list[str]:
        return [n.removesuffix(".weight") for n, w in self._source.weights.items() if len(w.spec.shape) > 1]

    def specs(self) -> list[Spec]:
        specs = [weight.spec for weight in self._source.weights.values()]
        for module, weight in self._source.nvfp4.items():
            specs += tensor_specs(module, weight.spec.shape, self._options.layout, self.input_scale)
        return specs

    def tasks(self, folder: ModelFolder) -> list[Task]:
        tasks = [copy_task(name, weight, folder) for name, weight in self._source.weights.items()]
        for module, weight in self._source.nvfp4.items():
            names = tensor_names(module, self._options.layout)[: 4 if self.input_scale else 3]
            run = self._relayout_task(names, weight, folder)
            tasks.append(Task(names, weight.packed.spec.nbytes, run))
        return tasks

    def _relayout_task(
        self, names: tuple[str, ...], weight: Nvfp4, folder: ModelFolder
    ) -> Callable[[Meter], None]:
        def run(shown: Meter) -> None:
            for name, stored in zip(names, (weight.packed, weight.scale), strict=False):
                folder.write(name, 0, stored.rows())
            scalars = [weight.global_scale, weight.input_scale][: len(names) - 2]
            for name, scalar in zip(names[2:], scalars, strict=True):
                value = scalar.rows().float().reshape(()) if scalar is not None else torch.ones(())
                if not (torch.isfinite(value) and value > 0):
                    raise CheckpointError(
                        f"{weight.module}: the global or input scale is {value.item()}, not positive"
                    )
                folder.write(name, 0, 1 / value)
            shown.add(weight.packed.spec.nbytes)

        return run


def _write_metadata(
    folder: ModelFolder, source: Source, options: Options, kept: list[str], input_scale: bool
) -> None:
    """config.json with the quantisation, and everything of the source that is neither weights nor that."""
    quantisation = quantisation_config(options.layout, input_scale, kept)
    config = {k: v for k, v in source.config.items() if k != "quantization_config"}
    folder.write_json("config.json", config | {"quantization_config": quantisation})
    if options.layout is Rule.MODELOPT:
        folder.write_json("hf_quant_config.json", legacy_config(quantisation))
    made_here = {"config.json", "hf_quant_config.json", "model.safetensors.index.json"}
    for file in sorted(source.path.iterdir()):
        weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        if file.is_file() and not weights and file.name not in made_here and not file.name.startswith("."):
            folder.copy(file)


def convert_gguf(source: Path, out: Path, options: Options) -> None:
    """By way of a 16-bit folder beside the output. It is removed at the end, and kept when the run is killed or
    stopped, so that the next one goes on from there."""
    from voltriton.checkpoint.gguf import gguf_to_folder

    check_output(out)
    stat = source.stat()
    mark = hashlib.sha256(f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:8]
    work = out.parent / f".{out.name}.gguf-{mark}"
    work.mkdir(parents=True, exist_ok=True)
    try:
        if not (work / "hf").is_dir():
            gguf_to_folder(source, work / "hf")
        convert(work / "hf", out, options)
    except (CheckpointError, OSError):
        shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="voltriton convert", description=__doc__)
    p.add_argument(
        "source",
        type=Path,
        metavar="SRC",
        help="Hugging Face folder, or GGUF file (the first of a split one)",
    )
    p.add_argument("out", type=Path, metavar="OUT", help="folder to make; must not hold anything")
    p.add_argument(
        "--layout", type=Rule, choices=list(Rule), default=Rule.COMPRESSED_TENSORS, help="default %(default)s"
    )
    p.add_argument(
        "--scales",
        choices=["max", "mse"],
        default="max",
        help="block scales from the largest value, as the other tools do, or of least squared error",
    )
    p.add_argument(
        "--include", action="append", default=[], metavar="PATTERN", help="quantise these modules too"
    )
    p.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="keep these modules in 16 bit"
    )
    p.add_argument(
        "--scheme",
        choices=["w4a16", "w4a4"],
        default="w4a16",
        help="w4a4 adds scales for 4-bit activations (needs --calib); default %(default)s",
    )
    _add_calibration(p)
    p.add_argument(
        "--jobs",
        type=at_least(0),
        default=0,
        metavar="N",
        help="tensors in work at a time; default: all cores",
    )
    return p


def _add_calibration(p: argparse.ArgumentParser) -> None:
    default = Recipe()
    p.add_argument(
        "--calib",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="choose scales and rounding on this text (.jsonl of chats or texts, or plain text); may be repeated",
    )
    p.add_argument(
        "--calib-tokens", type=at_least(2), default=default.tokens, metavar="N", help="default %(default)s"
    )
    p.add_argument(
        "--calib-window", type=at_least(2), default=default.window, metavar="N", help="default %(default)s"
    )
    p.add_argument(
        "--seed", type=int, default=default.seed, help="which parts of the text; default %(default)s"
    )
    p.add_argument(
        "--tune-tokens",
        type=at_least(0),
        default=default.tuning.tokens,
        metavar="N",
        help="tune the norms after the rounding, on so many tokens of the text; default %(default)s: not at all",
    )
    p.add_argument(
        "--no-feedback",
        action="store_true",
        help="only choose scales by activation: faster, and less bound to the text",
    )


def options_of(args: argparse.Namespace) -> Options:
    recipe = None
    if args.calib:
        numbers = (args.calib_tokens, args.calib_window, args.seed)
        recipe = Recipe(args.calib, *numbers, feedback=not args.no_feedback, tuning=Tuning(args.tune_tokens))
    elif args.scheme == "w4a4":
        raise CheckpointError("--scheme w4a4 needs --calib: input scales come from activations")
    return Options(
        args.layout, args.scales, args.include, args.exclude, args.jobs, args.scheme == "w4a4", recipe
    )


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    is_gguf = args.source.suffix == ".gguf"

    def action() -> None:
        if not args.source.exists():
            raise CheckpointError(f"{args.source} does not exist")
        missing = [f for f in args.calib if not f.is_file()]
        if missing:
            raise CheckpointError(f"{missing[0]} is no file")
        with step(f"converting {args.source} to {args.out}"):
            (convert_gguf if is_gguf else convert)(args.source, args.out, options_of(args))

    return run_command("convert", action)
