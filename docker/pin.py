"""Base images: docker/BASE names them, this keeps all other places the same and asks the registries for digests.

python docker/pin.py            the digest of each tag into BASE and everywhere (needs docker with buildx, a registry)
python docker/pin.py --copy     what BASE says, everywhere (needs neither)
python docker/pin.py --check    exit 1 and a line for each place that differs from BASE; a test does this too
python docker/pin.py --check --registry    and for each tag that has moved to another digest
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLACES = (
    "Dockerfile.v100",
    "Dockerfile.cpu",
    "Dockerfile.revolta",
    "compose.yaml",
    "kubernetes/base/gateway.yaml",
)
DIGEST = r"sha256:[0-9a-f]{64}"


def base() -> dict[str, str]:
    """Name -> image, such as debian:12-slim@sha256:..."""
    lines = (HERE / "BASE").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def written(image: str) -> re.Pattern[str]:
    """The image's repository with any tag and digest."""
    repository = image.split("@")[0].rpartition(":")[0]
    return re.compile(rf"(?<![\w./-]){re.escape(repository)}:[\w.-]+(?:@{DIGEST})?")


def differences() -> list[str]:
    """One line for each place that names another tag or digest than BASE."""
    found = []
    for place in PLACES:
        text = (HERE / place).read_text(encoding="utf-8")
        for image in base().values():
            found += [
                f"{place}: {match[0]}, BASE has {image}"
                for match in written(image).finditer(text)
                if match[0] != image
            ]
    return found


def copy() -> None:
    for place in PLACES:
        path = HERE / place
        text = path.read_text(encoding="utf-8")
        for image in base().values():
            text = written(image).sub(image, text)
        path.write_text(text, encoding="utf-8")


def digest(image: str) -> str:
    """The registry's digest of a tag now."""
    command = ["docker", "buildx", "imagetools", "inspect", image, "--format", "{{.Manifest.Digest}}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not re.fullmatch(DIGEST, said):
        raise ValueError(f"docker says {said!r} of {image}, a digest is needed")
    return said


def moved() -> list[str]:
    """One line for each tag whose digest is not the one in BASE."""
    found = []
    for image in base().values():
        tag, _, pinned = image.partition("@")
        if (now := digest(tag)) != pinned:
            found.append(f"BASE: {tag} is pinned to {pinned or 'nothing'}, the registry has {now}")
    return found


def pin() -> None:
    path = HERE / "BASE"
    text = path.read_text(encoding="utf-8")
    for image in base().values():
        tag = image.split("@")[0]
        text = text.replace(f"={image}\n", f"={tag}@{digest(tag)}\n")
    path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--registry", action="store_true")
    parser.add_argument("--copy", action="store_true")
    args = parser.parse_args()
    try:
        if args.check:
            lines = differences() + (moved() if args.registry else [])
            print("\n".join(lines) or "every place names what BASE names")
            return 1 if lines else 0
        if not args.copy:
            pin()
        copy()
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"pin: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
