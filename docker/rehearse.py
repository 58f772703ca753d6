"""Runs the steps of a Dockerfile's stage in a plain root folder by chroot, for machines without Docker. Needs root.

    debootstrap --variant=minbase --include=ca-certificates bookworm /tmp/root
    python docker/rehearse.py docker/Dockerfile.cpu /tmp/root --stage runtime

ARG, ENV, WORKDIR, COPY (from the checkout, or --from-folder for `COPY --from`) and RUN are carried out in their order.
A RUN with one of the --skip texts in it is left out, and said so. Other stages are not built. Resolver, pip's
configuration and certificates of this machine are put into the root first, so that packages can be had as here.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
BORROWED = ("/etc/resolv.conf", "/etc/pip.conf")
# Under another name: installing ca-certificates writes the usual one anew.
CERTIFICATES, BORROWED_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt"), "/opt/rehearsal.crt"


def instructions(text: str) -> list[tuple[str, str]]:
    """Continued lines joined, comments left out."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*#", line)]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (line.split(maxsplit=1)[0].upper(), line.split(maxsplit=1)[1])
        for line in joined.splitlines()
        if line.strip()
    ]


def stages(text: str) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Name -> (what it is made from, its instructions)."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    current: list[tuple[str, str]] = []
    for name, rest in instructions(text):
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            current = []
            found[stage.strip() or base] = (base.strip(), current)
        else:
            current.append((name, rest))
    return found


class Rehearsal:
    def __init__(
        self, root: Path, skip: list[str], arguments: dict[str, str], from_folder: Path | None
    ) -> None:
        self._root = root
        self._skip = skip
        self._arguments = arguments
        self._from_folder = from_folder
        self._variables = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
        }
        self._variables |= {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PIP_") or name.endswith("_proxy")
        }
        self._folder = "/"

    def borrow(self) -> None:
        for name in (*BORROWED, *os.environ.get("PIP_FIND_LINKS", "").split()):
            source, target = Path(name), self._root / name.lstrip("/")
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            elif source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)

        if CERTIFICATES.is_file():
            shutil.copy(CERTIFICATES, self._root / BORROWED_CERTIFICATES.lstrip("/"))
            for name in ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
                self._variables[name] = BORROWED_CERTIFICATES

    def inherit(self, all_stages: dict[str, tuple[str, list[tuple[str, str]]]], stage: str) -> None:
        """Variables and folder of the stages below, which are in the root already."""
        below = all_stages[stage][0]
        if below in all_stages:
            self.inherit(all_stages, below)
            self.run([step for step in all_stages[below][1] if step[0] in ("ENV", "WORKDIR")])

    def run(self, steps: list[tuple[str, str]]) -> None:
        for name, rest in steps:
            handlers = {
                "ARG": self.arg,
                "ENV": self.env,
                "WORKDIR": self.workdir,
                "COPY": self.copy,
                "RUN": self.execute,
            }
            if handler := handlers.get(name):
                handler(rest)

    def arg(self, rest: str) -> None:
        name, _, value = rest.partition("=")
        self._variables[name] = self._arguments.get(name, value)

    def env(self, rest: str) -> None:
        for part in shlex.split(rest):
            name, _, value = part.partition("=")
            self._variables[name] = self._expand(value)

    def workdir(self, rest: str) -> None:
        self._folder = rest.strip()
        (self._root / self._folder.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def copy(self, rest: str) -> None:
        *sources, target = [self._expand(part) for part in shlex.split(rest)]
        base = CHECKOUT
        sources = [name for source in sources for name in self._matches(source)]
        if sources[0].startswith("--from="):
            if self._from_folder is None:
                print(f"skipped: COPY {rest}")
                return
            sources = [f"{self._from_folder}{name}" for name in sources[1:]]
        place = self._root / str(Path(self._folder) / target).lstrip("/")
        for name in sources:
            source = base / name
            goal = place / source.name if target.endswith("/") or len(sources) > 1 else place
            if source.is_dir():
                shutil.copytree(
                    source,
                    place,
                    dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
                )
            else:
                goal.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, goal)

    @staticmethod
    def _matches(source: str) -> list[str]:
        """Names in the checkout; a pattern that fits none stays, and fails when it is copied."""
        found = (
            sorted(str(path.relative_to(CHECKOUT)) for path in CHECKOUT.glob(source)) if "*" in source else []
        )
        return found or [source]

    def execute(self, rest: str) -> None:
        if any(text in rest for text in self._skip):
            print(f"skipped: RUN {rest[:100]}", flush=True)
            return
        print(f"RUN {rest[:160]}", flush=True)
        began = time.monotonic()
        command = [
            "chroot",
            str(self._root),
            "/bin/bash",
            "-o",
            "pipefail",
            "-c",
            f"cd {shlex.quote(self._folder)} && {rest}",
        ]
        subprocess.run(command, env=self._variables, check=True, stdin=subprocess.DEVNULL)
        print(f"    {time.monotonic() - began:.0f} s", flush=True)

    def _expand(self, text: str) -> str:
        return re.sub(r"\$\{?(\w+)\}?", lambda match: self._variables.get(match.group(1), ""), text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("root", type=Path)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--skip", action="append", default=[], metavar="TEXT")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--from-folder", type=Path, help="what COPY --from is taken from")
    args = parser.parse_args()
    if not (args.root / "bin").exists():
        print(f"{args.root} is no root folder: run debootstrap first", file=sys.stderr)
        return 2
    all_stages = stages(args.dockerfile.read_text(encoding="utf-8"))
    if args.stage not in all_stages:
        print(f"no stage {args.stage}; there are {', '.join(all_stages)}", file=sys.stderr)
        return 2
    rehearsal = Rehearsal(
        args.root, args.skip, dict(item.split("=", 1) for item in args.build_arg), args.from_folder
    )
    rehearsal.borrow()
    try:
        rehearsal.inherit(all_stages, args.stage)
        rehearsal.run(all_stages[args.stage][1])
    except subprocess.CalledProcessError as error:
        print(f"failed with status {error.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
