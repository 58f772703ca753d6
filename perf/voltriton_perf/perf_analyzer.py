"""Fetches NVIDIA's perf_analyzer into `.voltriton/perf_analyzer` and starts it; no root is needed.

The binary of the `perf-analyzer` package needs glibc 2.38 and libstdc++ 3.4.32. Where the system has older ones
(Debian 12 has 2.36), it is started through the loader and libraries of Debian 13, laid out in a private folder: the
system's own libraries, apt sources and dpkg state are left as they are.

    python -m voltriton_perf.perf_analyzer          fetch, and say where it is
    python -m voltriton_perf.perf_analyzer -- ARGS  run it
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

VERSION = "2.60.0"
SUITE = "trixie"
# What the binary links, of Debian 13.
PACKAGES = ("libc6", "libstdc++6", "libgcc-s1", "zlib1g", "libssl3t64")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class FetchError(Exception):
    """One line that says why perf_analyzer cannot be had, and what to do."""


@dataclass(frozen=True)
class PerfAnalyzer:
    """Where it is laid out: `home/wheel-VERSION` and `home/root` (Debian 13's libraries)."""

    home: Path

    @property
    def binary(self) -> Path:
        return self.home / f"wheel-{VERSION}" / "perf_analyzer" / "bin" / "perf_analyzer"

    @property
    def libraries(self) -> Path:
        return self.home / "root" / "usr" / "lib" / "x86_64-linux-gnu"

    @property
    def command(self) -> list[str]:
        """The words that start it, before its own options."""
        loader = self.libraries / "ld-linux-x86-64.so.2"
        return [str(loader), "--library-path", str(self.libraries), str(self.binary)]

    @property
    def there(self) -> bool:
        return self.binary.exists() and (self.libraries / "ld-linux-x86-64.so.2").exists()

    def fetch(self) -> None:
        """Lays out what is missing. FetchError where it cannot be had here."""
        if (machine := platform.machine()) != "x86_64" or sys.platform != "linux":
            raise FetchError(f"perf_analyzer exists for x86_64 Linux only, this is {machine} {sys.platform}")
        self.home.mkdir(parents=True, exist_ok=True)
        if not self.binary.exists():
            self._fetch_binary()
        if not (self.libraries / "ld-linux-x86-64.so.2").exists():
            self._fetch_libraries()
        version = subprocess.run([*self.command, "--version"], capture_output=True, text=True, check=False)
        # The binary of every wheel calls itself 0.0.0; the pin is the wheel's version.
        if "Perf Analyzer Version" not in version.stdout + version.stderr:
            raise FetchError(
                f"perf_analyzer does not start ({last_line(version.stderr)}); remove {self.home} and try again"
            )

    def _fetch_binary(self) -> None:
        with tempfile.TemporaryDirectory(dir=self.home) as folder:
            # The wheel says which glibc it needs, which pip would compare with this system's.
            _run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:",
                 "--platform", "manylinux_2_38_x86_64", "-d", folder, f"perf-analyzer=={VERSION}"],
                f"perf-analyzer=={VERSION} could not be downloaded by pip",
            )  # fmt: skip
            wheel = next(Path(folder).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(self.home / f"wheel-{VERSION}")
        self.binary.chmod(0o755)

    def _fetch_libraries(self) -> None:
        missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
        if missing:
            raise FetchError(
                f"Debian 13's libraries are needed and {missing[0]} is not here (no Debian, no Ubuntu)"
            )
        with tempfile.TemporaryDirectory(dir=self.home) as folder:
            apt = Path(folder)
            for name in ("debs", "state/lists/partial", "cache/archives/partial"):
                (apt / name).mkdir(parents=True)
            signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
            (apt / "sources.list").write_text(f"deb {signed}{mirror()} {SUITE} main\n")
            options = _apt_options(apt)
            _run(["apt-get", "-qq", *options, "update"], f"the package lists of {SUITE} could not be fetched")
            _run(
                ["apt-get", "-qq", *options, "download", *PACKAGES],
                "Debian packages failed",
                cwd=apt / "debs",
            )
            for deb in sorted((apt / "debs").glob("*.deb")):
                _run(
                    ["dpkg-deb", "-x", str(deb), str(self.home / "root")], f"{deb.name} could not be unpacked"
                )


def _apt_options(apt: Path) -> list[str]:
    """Private lists, state and cache; the sandbox user could not write there."""
    values = {
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": apt / "state",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "root",
    }
    return [word for name, value in values.items() for word in ("-o", f"{name}={value}")]


def mirror(etc: Path = Path("/etc/apt")) -> str:
    """The Debian mirror that the system itself is set up with. FetchError where it has none."""
    found: list[str] = []
    for path, pattern in (
        (etc / "sources.list.d" / "debian.sources", r"^URIs:\s*(\S+)"),
        (etc / "sources.list", r"^deb (?:\[[^\]]*\] )?(\S+)"),
    ):
        if path.exists():
            found += re.findall(pattern, path.read_text(), re.M)
    usable = [uri for uri in found if "security" not in uri and "ubuntu" not in uri]
    if not usable:
        raise FetchError(f"no Debian mirror is named in {etc}: perf_analyzer's libraries cannot be fetched")
    return usable[0]


def _run(command: list[str], failure: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode:
        raise FetchError(f"{failure}: {last_line(done.stderr or done.stdout)}")


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def default_home() -> Path:
    """`.voltriton/perf_analyzer` of the checkout, or under $VOLTRITON_HOME."""
    root = os.environ.get("VOLTRITON_HOME")
    return (Path(root) if root else Path(__file__).resolve().parents[2] / ".voltriton") / "perf_analyzer"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="perf_analyzer", description="Fetch perf_analyzer, or run it.")
    parser.add_argument("--home", type=Path, default=default_home(), help="%(default)s")
    parser.add_argument("words", nargs="*", metavar="-- ARGS", help="options of perf_analyzer")
    args = parser.parse_args(argv)
    tool = PerfAnalyzer(args.home)
    try:
        if not tool.there:
            tool.fetch()
    except FetchError as error:
        print(f"perf_analyzer: {error}", file=sys.stderr)
        return 1
    if args.words:
        return subprocess.run([*tool.command, *args.words], check=False).returncode
    print(tool.binary)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
