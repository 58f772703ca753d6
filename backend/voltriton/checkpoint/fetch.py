"""`voltriton fetch NAME`: a demo model, or a model of yours, made ready for serving in NVFP4."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from voltriton.checkpoint.codec import Rule
from voltriton.checkpoint.convert import Options, convert
from voltriton.checkpoint.demo_texts import demo_texts
from voltriton.checkpoint.download import Model, fetch_gguf, known_models
from voltriton.checkpoint.errors import CheckpointError, run_command
from voltriton.checkpoint.folder import check_free_disk
from voltriton.checkpoint.progress import step
from voltriton.checkpoint.rounding import Recipe
from voltriton.checkpoint.source import nvfp4_rule, quantisation_of, read_config, read_folder

# Enough for the scale search (docs/quality.md); more costs every first `make demo` its time.
CALIBRATION_TOKENS = 8192


def checkout_root() -> Path:
    """The checkout that this package lies in, else the current folder."""
    here = Path(__file__).resolve()
    return next((p for p in here.parents if (p / "pyproject.toml").is_file()), Path.cwd())


@dataclass(frozen=True)
class Places:
    """Where things go under `.voltriton`."""

    root: Path
    name: str
    out: Path | None
    languages: tuple[str, ...]  # of the calibration text; none: no calibration

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def hf(self) -> Path:
        return self.root / "models" / f"{self.name}-hf"

    @property
    def result(self) -> Path:
        return self.out or self.root / "models" / f"{self.name}-nvfp4"


def usable(folder: Path) -> bool:
    """Whether a model that this command makes is there. A damaged one raises, and is left for the user to see."""
    if not folder.is_dir():
        return False
    try:
        read_config(folder)
        read_folder(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; to have it made anew, move {folder} away and run again") from None
    return True


def prepare(what: str, root: Path, out: Path | None, keep_16bit: bool, calibrated: bool) -> Path:
    """The NVFP4 folder for a known name or a path, made if it is not there yet."""
    model = known_models().get(what)
    if model is not None:
        places = Places(root, model.name, out, model.languages if calibrated else ())
        return _prepare_gguf(places, keep_16bit, model)
    path = Path(what)
    if not path.exists():
        raise CheckpointError(f"{what!r} is neither a file or folder nor one of {', '.join(known_models())}")
    # What the user's model is for is not known here: `voltriton convert --calib` takes his own text.
    places = Places(root, path.resolve().name.removesuffix(".gguf"), out, ())
    if path.is_file():
        return _prepare_gguf(places, keep_16bit, path)
    if nvfp4_rule(quantisation_of(path, read_config(path))) is not None:
        read_folder(path)
        print(f"{path} is an NVFP4 checkpoint: used as it is")
        return path.resolve()
    return _quantised(places, path)


def _prepare_gguf(places: Places, keep_16bit: bool, origin: Model | Path) -> Path:
    if _there(places.result) and (not keep_16bit or _there(places.hf)):
        return places.result
    if not usable(places.hf):
        _expand(places.hf, _gguf_file(places, origin))
    if not usable(places.result):
        _quantised(places, places.hf)
    if not keep_16bit:
        _remove(places.hf)
    if isinstance(origin, Model):
        (places.cache / origin.gguf).unlink(missing_ok=True)  # its wheels stay in the cache
    return places.result


def _there(folder: Path) -> bool:
    if not usable(folder):
        return False
    print(f"{folder} is there already")
    return True


def _gguf_file(places: Places, origin: Model | Path) -> Path:
    if isinstance(origin, Path):
        return origin
    check_free_disk(places.cache, origin.need_mb * 1_000_000, f"preparing {origin.name}")
    places.cache.mkdir(parents=True, exist_ok=True)
    with step(f"1/3 getting {origin.title}"):
        return fetch_gguf(origin, places.cache)


def _expand(out: Path, gguf: Path) -> None:
    from voltriton.checkpoint.gguf import gguf_to_folder

    out.parent.mkdir(parents=True, exist_ok=True)
    with step(f"2/3 turning {gguf.name} into a 16-bit folder"):
        gguf_to_folder(gguf, out)


def _quantised(places: Places, source: Path) -> Path:
    if not usable(places.result):
        places.result.parent.mkdir(parents=True, exist_ok=True)
        with step(f"3/3 quantising {source.name} to NVFP4"):
            recipe = _recipe(places)
            convert(source, places.result, Options(Rule.COMPRESSED_TENSORS, "mse", calibration=recipe))
    return places.result


def _recipe(places: Places) -> Recipe | None:
    if not places.languages:
        return None
    try:
        texts = demo_texts(places.languages, places.cache)
    except CheckpointError as error:
        print(f"  without calibration (lower quality), as its text cannot be had: {error}", flush=True)
        return None
    return Recipe(texts, tokens=CALIBRATION_TOKENS, feedback=False)


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def link_model(result: Path, link: Path) -> None:
    """Point `link` at the model, atomically; only a link is ever replaced."""
    if link.exists() and not link.is_symlink():
        raise CheckpointError(f"{link} is there and no link: rename it, or give another name with --link")
    link.parent.mkdir(parents=True, exist_ok=True)
    temp = link.with_name(f".{link.name}.{os.getpid()}")
    temp.symlink_to(os.path.relpath(result.resolve(), link.parent.resolve()))
    temp.replace(link)
    print(f"{link} -> {result}")


def main(argv: list[str]) -> int:
    names = ", ".join(known_models())
    p = argparse.ArgumentParser(prog="voltriton fetch", description=__doc__)
    p.add_argument("what", metavar="NAME", help=f"{names}, or the path of a Hugging Face folder or GGUF file")
    p.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the result goes; default models/NAME-nvfp4 under --root",
    )
    p.add_argument("--root", type=Path, metavar="DIR", help="the .voltriton folder; default: the checkout's")
    p.add_argument(
        "--link", default="demo", metavar="NAME", help="link models/NAME to the result; default %(default)s"
    )
    p.add_argument(
        "--calib",
        action="store_true",
        help="calibrate a named model on chat text: better, and minutes longer",
    )
    p.add_argument(
        "--no-16bit", action="store_true", help="do not keep the 16-bit folder (tests compare with it)"
    )
    args = p.parse_args(argv)
    root = (args.root or checkout_root() / ".voltriton").resolve()

    def action() -> None:
        # Building a tokenizer from a local folder must not ask a server for anything.
        os.environ["HF_HUB_OFFLINE"] = "1"
        out = args.out.resolve() if args.out else None
        result = prepare(args.what, root, out, not args.no_16bit, args.calib)
        link_model(result, root / "models" / args.link)

    return run_command("fetch", action)
