"""`voltriton sla`: finds the highest number of users for which every target holds, and says so for CI.

Exit status: 0 the wanted users are served within the targets, 1 they are not (or nothing could be measured).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table
from voltriton_client import VoltritonError

from voltriton_perf import inputs, profile, report
from voltriton_perf.bench import Bench, Measured
from voltriton_perf.inputs import InputError, Shape
from voltriton_perf.load import Prompt
from voltriton_perf.pa import Level
from voltriton_perf.profile import Profile, ProfileError, Verdict
from voltriton_perf.setup import describe_setup
from voltriton_perf.signals import as_interrupts
from voltriton_perf.stats import summarise
from voltriton_perf.sweep import add_service_options, console, counter_of, fixed_length, progress, service_of

FORMAT = "voltriton-sla/1"
# Texts made for each kind of traffic; requests beyond take them again.
PROMPTS_A_KIND = 48


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="voltriton sla", description=__doc__)
    add_service_options(parser)
    parser.add_argument("--profile", default="seeds", metavar="NAME|FILE", help="YAML; %(default)s")
    parser.add_argument("--users", type=int, metavar="N", help="wanted users, instead of the profile's")
    parser.add_argument(
        "--out", type=Path, default=Path("perf-results"), metavar="FOLDER", help="%(default)s"
    )
    args = parser.parse_args(argv)
    try:
        with as_interrupts():
            return Sla(args, argv).run()
    except (VoltritonError, InputError, ProfileError, report.ResultError, OSError) as error:
        print(f"voltriton sla: {error}", file=sys.stderr)
        return 1


@dataclass
class Step:
    """One number of users that was tried."""

    users: int
    measured: Measured
    verdicts: list[Verdict]

    @property
    def met(self) -> bool:
        return self.measured.failed is None and all(v.met for v in self.verdicts)


class Sla:
    def __init__(self, args: argparse.Namespace, argv: list[str]) -> None:
        self._args = args
        self._command = ["voltriton", "sla", *argv]
        self._profile = with_users(profile.load(args.profile), args.users)
        self._file = f"sla-{self._profile.name}"
        self._service = service_of(args)
        self._bench = Bench(self._service, {}, args.seed, args.timeout)
        self._steps: list[Step] = []
        self._prompts: list[Prompt] = []

    def run(self) -> int:
        self._service.inputs()
        report.check_place(self._args.out, self._file)
        print("making prompts ...", file=sys.stderr, flush=True)
        self._prompts = self._make_prompts()
        complete = False
        try:
            with progress() as bar:
                search(self._profile, lambda users: self._try(users, bar))
            complete = not any(s.measured.interrupted for s in self._steps)
        except KeyboardInterrupt:
            print("interrupted; what was measured is kept", file=sys.stderr)
        return self._finish(complete)

    def _make_prompts(self) -> list[Prompt]:
        """Prompts of the mix in random order, so that any stretch of them has about its shares."""
        p, count = self._profile, counter_of(self._args, self._service)
        shares = [part.share for part in p.mix]
        texts = []
        for i, part in enumerate(p.mix):
            shape = Shape(part.prompt_tokens, p.language, p.shared_prefix)
            texts.append(inputs.make_prompts(shape, PROMPTS_A_KIND, self._args.seed + i, count))
        rng = random.Random(self._args.seed)
        total = p.most * p.requests_per_user
        kinds = rng.choices(range(len(p.mix)), shares, k=total)
        return [
            Prompt(
                texts[k][n % PROMPTS_A_KIND],
                f"prompt {p.mix[k].prompt_tokens}",
                fixed_length(p.mix[k].output_tokens),
            )
            for n, k in enumerate(kinds)
        ]

    def _try(self, users: int, bar: Progress) -> bool | None:
        """Whether the targets hold for so many users; None where the run was interrupted."""
        requests = users * self._profile.requests_per_user
        level = Level("concurrency", users, requests)
        task = bar.add_task(f"{users} users", total=requests)
        if not self._steps:
            self._bench.warm_up(self._prompts[: min(4, len(self._prompts))], 2, 4)
        measured = self._bench.measure(level, self._prompts, lambda record: bar.advance(task))
        if not measured.records:
            return None
        self._steps.append(
            Step(users, measured, profile.judge(self._profile.targets, summarise(measured.records)))
        )
        return None if measured.interrupted else self._steps[-1].met

    def _finish(self, complete: bool) -> int:
        if not self._steps:
            print("voltriton sla: nothing was measured", file=sys.stderr)
            return 1
        best = max((s.users for s in self._steps if s.met and not s.measured.interrupted), default=0)
        wanted = self._profile.wanted
        shown = next((s for s in self._steps if s.users == wanted), self._steps[-1])
        path = report.write(self._result(complete, best, shown), self._args.out, self._file)
        console().print(verdict_table(shown))
        passed = complete and best >= wanted
        print(
            f"highest load within the targets: {best} users; wanted: {wanted}: {'PASSED' if passed else 'FAILED'}"
        )
        print(f"report: {path.with_suffix('.html')} and {path.name} beside it", file=sys.stderr)
        if shown.measured.failed:
            print(f"voltriton sla: {shown.users} users: {shown.measured.failed}", file=sys.stderr)
        return 0 if passed else 1

    def _result(self, complete: bool, best: int, shown: Step) -> dict[str, Any]:
        levels = [
            {
                **s.measured.as_dict(),
                "mode": "users",
                "verdicts": [asdict(v) for v in s.verdicts],
                "met": s.met,
            }
            for s in sorted(self._steps, key=lambda s: s.users)
        ]
        return {
            "format": FORMAT, "name": self._profile.name, "complete": complete,
            "notes": [f"highest load within the targets: {best} users; wanted: {self._profile.wanted}",
                      f"the verdicts are those of {shown.users} users"],
            "best_users": best, "wanted_users": self._profile.wanted,
            "setup": describe_setup(self._command, self._args.model_path),
            "options": {"profile": asdict(self._profile), "seed": self._args.seed},
            "verdicts": [asdict(v) for v in shown.verdicts], "levels": levels,
        }  # fmt: skip


def with_users(found: Profile, users: int | None) -> Profile:
    if users is None:
        return found
    if users < 1:
        raise ProfileError(f"--users: got {users}, allowed: 1 or more")
    return replace(
        found, wanted=users, least=min(found.least, users), most=max(users, min(found.most, 2 * users))
    )


def search(found: Profile, holds: Callable[[int], bool | None]) -> None:
    """Tries the wanted users first, then doubles while it holds or halves while it does not, then bisects.

    The step of the bisection is an eighth of the load: finer than the noise of a short run is no use.
    """
    users, good, bad = found.wanted, 0, 0
    while True:
        held = holds(users)
        if held is None:
            return
        good, bad = (users, bad) if held else (good, users)
        if (held and users == found.most) or (not held and users == found.least):
            return
        if good and bad:
            if bad - good <= max(1, good // 8):
                return
            users = (good + bad) // 2
        elif held:
            users = min(users * 2, found.most)
        else:
            users = max(users // 2, found.least)


def verdict_table(step: Step) -> Table:
    table = Table(title=f"{step.users} users")
    for heading in ("target", "allowed", "got", "verdict"):
        table.add_column(heading, justify="right")
    for v in step.verdicts:
        table.add_row(
            v.target, v.allowed, "-" if v.got is None else f"{v.got:g}", "met" if v.met else "MISSED"
        )
    return table
