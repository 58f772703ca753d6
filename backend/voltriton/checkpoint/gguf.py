"""`voltriton gguf2hf FILE OUT`: a GGUF file -> a 16-bit Hugging Face folder that vLLM loads offline."""

from __future__ import annotations

import argparse
import mmap
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from voltriton.checkpoint.errors import FETCH_AGAIN, CheckpointError, run_command
from voltriton.checkpoint.folder import ModelFolder, check_output
from voltriton.checkpoint.gguf_config import check_family, config_of, generation_config, hf_name
from voltriton.checkpoint.gguf_tokenizer import build_tokenizer
from voltriton.checkpoint.inspection import complete
from voltriton.checkpoint.progress import meter, step
from voltriton.checkpoint.source import Source
from voltriton.checkpoint.tensors import Spec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CHUNK_VALUES = 4 << 20
# Two copies of one embedding at two precisions differ by a few per cent; other matrices by over 100 %.
TIED_BELOW = 0.2
TIED_SAMPLE_ROWS = 2048
SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; `raw` is the mapped data, [rows, bytes] for matrices."""

    name: str
    shape: tuple[int, ...]
    raw: npt.NDArray[Any]
    kind: Any

    def rows(self, index: slice | npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        from gguf import dequantize

        values: npt.NDArray[np.float32] = dequantize(self.raw[index], self.kind)
        return values.astype(np.float32, copy=False)

    @property
    def bits_per_weight(self) -> float:
        return self.raw.nbytes * 8 / float(np.prod(self.shape))


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], list[Any]]:
    """Metadata and tensors of a file, or of all parts of a split one, and the readers that hold the maps."""
    from gguf import GGUFReader

    meta: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    readers = []
    for part in split_parts(path):
        try:
            reader = GGUFReader(str(part))
            meta = meta or {key: field.contents() for key, field in reader.fields.items()}
            for t in reader.tensors:
                shape = tuple(int(n) for n in reversed(t.shape))
                tensors[t.name] = Tensor(t.name, shape, t.data, t.tensor_type)
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError, AssertionError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(
                f"{part}: not a GGUF file, or damaged or cut off ({reason}): {FETCH_AGAIN}"
            ) from error
        readers.append(reader)
    return meta, tensors, readers


def split_parts(path: Path) -> list[Path]:
    """All files of `name-00001-of-00003.gguf`; any of them may be given."""
    if not path.is_file():
        raise CheckpointError(f"{path} is no file")
    match = SPLIT_NAME.search(path.name)
    if not match:
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    parts = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [p.name for p in parts if not p.is_file()]
    if missing:
        raise CheckpointError(f"{path}: {missing[0]} of this split file is missing")
    return parts


def pick_embedding(tensors: dict[str, Tensor]) -> tuple[set[str], bool]:
    """(names to leave out, whether embedding and output are tied).

    Files of tied models often hold two copies, at two precisions: tie them again with the better one, which
    is smaller and closer to the original.
    """
    if "output.weight" not in tensors:
        return set(), True
    pair = tensors["token_embd.weight"], tensors["output.weight"]
    if pair[0].shape != pair[1].shape:
        return set(), False
    x, y = (t.rows(slice(0, TIED_SAMPLE_ROWS)) for t in pair)
    if float(np.linalg.norm(x - y)) > TIED_BELOW * float(np.linalg.norm(y)):
        return set(), False
    best = max(pair, key=lambda t: t.bits_per_weight)
    return {t.name for t in pair} - {best.name}, True


def unpermutation(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Row order that undoes llama.cpp's: it stores q and k of llama in interleaved (GPT-J) rotary order,
    Hugging Face wants the two halves of a head one after the other."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def gguf_to_folder(path: Path, out: Path, dtype: str = "bfloat16", chat_template: str | None = None) -> None:
    """Raises CheckpointError for a damaged file, an unknown family or tokenizer. `out` appears when whole."""
    check_output(out)
    meta, tensors, readers = read_gguf(path)
    family = check_family(meta)
    if "tokenizer.ggml.tokens" not in meta or "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path}: no language model: tokens or embedding are missing")
    skip, tied = pick_embedding(tensors)
    factors = tensors.pop("rope_freqs.weight", None)
    rope = None if factors is None else [float(x) for x in factors.rows(slice(None))]
    config = config_of(meta, dtype, tied, rope)
    wanted = {_target(name, family, tied): t for name, t in tensors.items() if name not in skip}
    specs = [Spec(name, DTYPES[dtype], t.shape) for name, t in wanted.items()]
    stat = path.stat()
    identity = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {dtype}"
    with ModelFolder(out, specs, identity) as folder:
        tokenizer = build_tokenizer(split_parts(path)[0], meta, chat_template)
        _write_weights(folder, wanted, family, config, DTYPES[dtype], readers)
        tokenizer.save_pretrained(folder.path)
        folder.write_json("config.json", config)
        folder.write_json("generation_config.json", generation_config(meta))
        complete(Source(folder.path))  # what the metadata says against the tensors that are there


def _target(name: str, family: str, tied: bool) -> str:
    return hf_name("token_embd.weight" if tied and name == "output.weight" else name, family)


def _write_weights(
    folder: ModelFolder,
    wanted: dict[str, Tensor],
    family: str,
    config: dict[str, Any],
    dtype: torch.dtype,
    readers: list[Any],
) -> None:
    with meter("expanding", sum(t.raw.nbytes for t in wanted.values())) as shown:
        for name, tensor in wanted.items():
            if name in folder.done:
                continue
            fix = _fix_of(name, family, config, tensor)
            for begin, end, values in _chunks(tensor, fix.order):
                with np.errstate(invalid="ignore"):  # NaN is looked for in the next lines
                    data = torch.from_numpy(np.ascontiguousarray(values - fix.minus)).to(dtype)
                if not torch.isfinite(data).all():
                    raise CheckpointError(
                        f"{tensor.name}: NaN or infinite values in rows {begin} to {end - 1}"
                    )
                folder.write(name, begin * data[0].nbytes, data)
            folder.finish(name)
            shown.add(tensor.raw.nbytes)
            _forget_pages(readers)


@dataclass(frozen=True)
class _Fix:
    order: Callable[[int, int], slice | npt.NDArray[np.int64]]
    minus: float = 0.0


def _fix_of(name: str, family: str, config: dict[str, Any], tensor: Tensor) -> _Fix:
    leaf = name.split(".")[-2]
    if family == "llama" and leaf in ("q_proj", "k_proj"):
        heads = config["num_attention_heads" if leaf == "q_proj" else "num_key_value_heads"]
        order = unpermutation(tensor.shape[0], heads)
        return _Fix(lambda begin, end: order[begin:end])
    # llama.cpp stores Gemma's norms as 1 + w.
    minus = 1.0 if family == "gemma3" and leaf.endswith("norm") else 0.0
    return _Fix(lambda begin, end: slice(begin, end), minus)


def _chunks(tensor: Tensor, order: Callable[[int, int], Any]) -> Any:
    rows = tensor.shape[0]
    size = max(CHUNK_VALUES // max(int(np.prod(tensor.shape[1:])), 1), 1)
    for begin in range(0, rows, size):
        end = min(begin + size, rows)
        yield begin, end, tensor.rows(order(begin, end)).reshape(end - begin, *tensor.shape[1:])


def _forget_pages(readers: list[Any]) -> None:
    """Pages of a mapped file count as our memory until they are given back."""
    for reader in readers:
        mapped = getattr(reader.data, "_mmap", None)
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="voltriton gguf2hf", description=__doc__)
    p.add_argument("gguf", type=Path, metavar="FILE", help="GGUF file; of a split one, any part")
    p.add_argument("out", type=Path, metavar="OUT", help="folder to make; must not hold anything")
    p.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="default %(default)s")
    p.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja file in place of the one inside")
    args = p.parse_args(argv)

    def action() -> None:
        template = args.chat_template.read_text(encoding="utf-8") if args.chat_template else None
        with step(f"turning {args.gguf} into {args.out}"):
            gguf_to_folder(args.gguf, args.out, args.dtype, template)

    return run_command("gguf2hf", action)
