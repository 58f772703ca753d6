"""`python -m voltriton_perf.soak --minutes 30`: many clients, cancels, kills and reloads; does anything lie or leak?

Against a server that is running (see `voltriton serve`), over gRPC and its metrics page. Each client asks for a greedy
answer, streamed or whole, of a random length, and now and then cancels in mid-stream. Checked:

* the joined stream of a prompt equals its whole answer, and so do all answers to it;
* the tokens that the answers report add up to what the server's counter says (in rounds without a fault);
* every request ends within its limit: with text, or with UNAVAILABLE while a fault is being repaired;
* memory, open files, threads and /dev/shm of the server's processes are flat from the first round to the last.

`--server-pid` is the process whose tree is watched (`voltriton serve`, or tritonserver): kills need it too. The report
is a JSON file. Exit status 0: nothing was found; 1: something was.

Two faults of Triton 24.10 itself are counted apart (`triton_faults`), each with its evidence, and allowed as often as
`--triton-faults` says: an answer `unknown model: ''`, which nobody asked for, and, with `--state`, the supervisor's
note that tritonserver died of signal 11 in a round in which clients cancelled (upstream has mended such races after
24.10: triton-inference-server/server#7368, #8034).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
from voltriton_client.aio import AsyncClient
from voltriton_client.errors import VoltritonError

from voltriton_perf import proc

TOKENS = "vllm:generation_tokens_total"
RESTARTS = "voltriton:engine_restarts_total"
# What a request may end with while a fault is being repaired.
EXCUSED = ("UNAVAILABLE", "NOT_FOUND")
# Every request names its model: Triton has mixed up its own states.
NOBODYS_MODEL = "Request for unknown model: ''"
# Open files more than in the second round that are no leak, and how long they have to go.
FD_SLACK, SETTLE_S = 16, 10.0
SIGNAL_11 = "tritonserver ended with status -11"
PROMPTS = [
    "Once upon a time", "The capital of France is", "def fibonacci(n):", "In 1969", "To be, or not",
    "The three laws of", "A list of colours: red,", "Water boils at",
]  # fmt: skip


@dataclass(frozen=True)
class Options:
    server: str
    metrics: str
    minutes: float
    clients: int
    model: str
    max_tokens: int
    server_pid: int | None
    kills: int
    restarts: int
    cancel_share: float
    limit_s: float
    seed: int
    state: Path | None
    triton_faults: int
    report: Path | None


GRPC_POOLS = ("event_engine", "default-executo", "resolver-execut", "grpc_global_tim")  # cut to 15 characters


@dataclass
class Tree:
    """What a tree of processes holds."""

    rss_mib: float = 0.0
    fds: int = 0
    threads: int = 0
    # Of gRPC's pools, which are not in `threads`: they grow with the peaks of load, to about 40 with 64 clients.
    pool_threads: int = 0
    shm_files: int = 0
    processes: int = 0


@dataclass
class Report:
    began: float = field(default_factory=time.time)
    seconds: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    slowest_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    # Seconds from a fault to the first answer after it.
    repairs_s: list[float] = field(default_factory=list)
    triton_faults: list[str] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def thread_name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:
        return ""


def measure(root: int) -> Tree:
    """A process that ends meanwhile counts for nothing."""
    total, files = Tree(), set()
    for pid in proc.tree(root):
        folder = Path(f"/proc/{pid}")
        try:
            rss = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            fds = len(list((folder / "fd").iterdir()))
            threads = [thread_name(task) for task in (folder / "task").iterdir()]
            maps = (folder / "maps").read_text(errors="replace").splitlines()
        except OSError:
            continue
        total.rss_mib += rss / 2**20
        total.fds += fds
        pooled = sum(name in GRPC_POOLS for name in threads)
        total.pool_threads += pooled
        total.threads += len(threads) - pooled
        total.processes += 1
        files |= {line.partition("/dev/shm/")[2] for line in maps if "/dev/shm/" in line}
    total.shm_files = len(files)
    return total


class Soak:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.report = Report()
        self._random = random.Random(options.seed)
        self._known: dict[tuple[str, int], str] = {}
        self._fault_at: float | None = None
        self._stop_at = 0.0
        # Tokens of cancelled answers are counted by the server, and only in part by us.
        self._uncounted = False
        # Of this round: whether something was broken, what failed, and how many repairs there were before it.
        self._broken = False
        self._failures: list[str] = []
        self._repairs = 0

    async def run(self) -> Report:
        """Rounds of half a minute (at least four); the server is idle between them, which is when it is measured."""
        end = time.monotonic() + self.options.minutes * 60
        rounds = max(4, round(self.options.minutes * 2))
        faults = self._plan(rounds)
        for number in range(rounds):
            # The last rounds get what is left of the time; at least some seconds each.
            left = max(6.0, (end - time.monotonic()) / (rounds - number))
            await self._round(left - 2.0, faults.get(number, []), cancels=number % 2 == 1)
        self.report.seconds = round(time.time() - self.report.began, 1)
        self._check_flat()
        if len(self.report.triton_faults) > self.options.triton_faults:
            self._problem(
                f"{len(self.report.triton_faults)} faults of Triton itself, {self.options.triton_faults} allowed"
            )
        return self.report

    def _plan(self, rounds: int) -> dict[int, list[str]]:
        """Round -> faults; none in the first two (the second is the yardstick) nor in the last."""
        plan: dict[int, list[str]] = {}
        wanted = ["kill"] * self.options.kills + ["restart"] * self.options.restarts
        for i, fault in enumerate(wanted if self.options.server_pid else []):
            plan.setdefault(2 + i % (rounds - 3), []).append(fault)
        return plan

    async def _round(self, seconds: float, faults: list[str], cancels: bool) -> None:
        self._stop_at = time.monotonic() + seconds
        self._uncounted = cancels or bool(faults)
        self._broken = bool(faults)
        self._repairs = self._supervisor()[0]
        before, tokens = await self._metric(TOKENS), self.report.tokens
        tasks = [asyncio.create_task(self._client(cancels)) for _ in range(self.options.clients)]
        if faults:
            await self._break(faults, seconds)
        await asyncio.gather(*tasks)
        await asyncio.sleep(2.0)  # the counters come once a second
        self._judge(cancels)
        ours, theirs = self.report.tokens - tokens, await self._metric(TOKENS) - before
        # The supervisor's canary asks for a token now and then.
        slack = seconds / 5 + 2 if self.options.server_pid else 0
        if not self._uncounted and not ours <= theirs <= ours + slack:
            self._problem(f"the answers have {ours} tokens, the server counted {theirs:.0f}")
        if self.options.server_pid is not None:
            self.report.trees.append(await self._settled(self.options.server_pid))

    async def _settled(self, pid: int) -> Tree:
        """Connections that clients have closed take the server a moment: the fewest files within some seconds."""
        best = measure(pid)
        deadline = time.monotonic() + SETTLE_S
        while len(self.report.trees) > 1 and best.fds > self.report.trees[1].fds + FD_SLACK:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
            best = min(best, measure(pid), key=lambda tree: tree.fds)
        return best

    async def _client(self, cancels: bool) -> None:
        async with AsyncClient(self.options.server) as client:
            while time.monotonic() < self._stop_at:
                prompt = self._random.choice(PROMPTS)
                length = self._random.choice([1, 4, 16, self.options.max_tokens])
                cancel = cancels and self._random.random() < self.options.cancel_share
                began = time.monotonic()
                try:
                    async with asyncio.timeout(self.options.limit_s):
                        await self._request(client, prompt, length, cancel)
                except VoltritonError as error:
                    self._failed(error)
                    await asyncio.sleep(0.2)
                except TimeoutError:
                    self._problem(f"a request has not ended within {self.options.limit_s:g} s")
                self.report.slowest_s = max(self.report.slowest_s, round(time.monotonic() - began, 3))

    async def _request(self, client: AsyncClient, prompt: str, length: int, cancel: bool) -> None:
        began = time.monotonic()
        asked = {"model": self.options.model, "max_tokens": length, "temperature": 0.0, "ignore_eos": True}
        if not cancel and self._random.random() < 0.5:
            result = await client.generate(prompt, **asked)
            self._answered("whole", began, prompt, length, result.text, result.usage.completion_tokens)
            return
        text, tokens = "", 0
        stream = client.stream(prompt, **asked)
        async for chunk in stream:
            text += chunk.text
            tokens += chunk.num_tokens
            if cancel and tokens < length:
                await stream.aclose()
                self._count("cancelled")
                return
        self._answered("streamed", began, prompt, length, text, tokens)

    def _answered(self, how: str, began: float, prompt: str, length: int, text: str, tokens: int) -> None:
        self._count(how)
        self.report.tokens += tokens
        if self._fault_at is not None and began > self._fault_at:
            self.report.repairs_s.append(round(time.monotonic() - self._fault_at, 2))
            self._fault_at = None
        known = self._known.setdefault((prompt, length), text)
        if known != text:
            self._problem(
                f"{how}: {prompt!r} with {length} tokens gave {text[:80]!r}, before it was {known[:80]!r}"
            )

    def _failed(self, error: VoltritonError) -> None:
        self._count(error.code)
        text = f"a request failed: {error.code}: {error}"
        if NOBODYS_MODEL in text:
            self.report.triton_faults.append(text)
        elif not (self._broken and error.code in EXCUSED):
            self._failures.append(text)

    def _judge(self, cancels: bool) -> None:
        """What failed in this round is a problem, unless tritonserver itself died of the cancellations in it."""
        repairs, failure = self._supervisor()
        if cancels and repairs > self._repairs and SIGNAL_11 in failure:
            self.report.triton_faults.append(f"{failure} ({len(self._failures)} requests lost)")
            self._failures = [text for text in self._failures if "UNAVAILABLE" not in text]
        for text in self._failures:
            self._problem(text)
        self._failures = []

    def _supervisor(self) -> tuple[int, str]:
        """Its repairs so far, and what the last one was for."""
        if self.options.state is None:
            return 0, ""
        status = json.loads(self.options.state.read_text())
        return status["repairs"], status["last_failure"] or ""

    async def _break(self, faults: list[str], seconds: float) -> None:
        """One after the other, each when the one before has been repaired; the round goes on until the last is."""
        for fault in faults:
            await asyncio.sleep(min(3.0, seconds / (len(faults) + 2)))
            pid = self._victim(fault)
            if pid is None:
                self._problem(f"{fault}: there is no such process below {self.options.server_pid}")
                continue
            self._fault_at = time.monotonic()
            self.report.faults.append(fault)
            os.kill(pid, signal.SIGKILL)
            while self._fault_at is not None:
                self._stop_at = max(self._stop_at, time.monotonic() + 3.0)
                await asyncio.sleep(0.1)
                if time.monotonic() - (self._fault_at or time.monotonic()) > self.options.limit_s:
                    self._problem(f"no answer within {self.options.limit_s:g} s of a fault")
                    self._fault_at = None

    def _victim(self, fault: str) -> int | None:
        marks = (
            ["-m voltriton.host"]
            if fault == "kill"
            else ["triton_python_backend_stub", f"/{self.options.model}/"]
        )
        for pid in proc.tree(self.options.server_pid or 0):
            line = command(pid)
            if all(mark in line for mark in marks):
                return pid
        return None

    async def _metric(self, name: str) -> float:
        """Sum over all labels; 0 while there is no metrics page."""
        try:
            async with httpx.AsyncClient(trust_env=False) as http:
                page = (await http.get(f"http://{self.options.metrics}/metrics", timeout=5.0)).text
        except httpx.HTTPError:
            return 0.0
        lines = (line for line in page.splitlines() if line.startswith(name + "{"))
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def _check_flat(self) -> None:
        """The second round is the yardstick: the first one still fills caches and pools."""
        trees = self.report.trees
        if len(trees) < 3:
            return
        first, last = trees[1], trees[-1]
        limits: list[tuple[str, Callable[[Tree], float], float]] = [
            ("rss_mib", lambda t: t.rss_mib, max(64.0, 0.1 * first.rss_mib)),
            ("fds", lambda t: t.fds, FD_SLACK), ("threads", lambda t: t.threads, 12),
            ("pool_threads", lambda t: t.pool_threads, 48),
            ("shm_files", lambda t: t.shm_files, 0), ("processes", lambda t: t.processes, 0),
        ]  # fmt: skip
        for name, of, slack in limits:
            if of(last) > of(first) + slack:
                self._problem(
                    f"{name} grew from {of(first):.0f} to {of(last):.0f} (allowed: {slack:.0f} more)"
                )

    def _count(self, outcome: str) -> None:
        self.report.outcomes[outcome] = self.report.outcomes.get(outcome, 0) + 1

    def _problem(self, text: str) -> None:
        if len(self.report.problems) < 50:
            self.report.problems.append(text)


def parse(argv: list[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m voltriton_perf.soak", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--server", default="127.0.0.1:8001", metavar="HOST:PORT", help="gRPC (%(default)s)")
    parser.add_argument("--metrics", default="127.0.0.1:8002", metavar="HOST:PORT")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--model", default="vllm")
    parser.add_argument("--max-tokens", type=int, default=64, help="of the longest answers (%(default)s)")
    parser.add_argument(
        "--server-pid", type=int, help="of `voltriton serve`: watch its tree, and break things in it"
    )
    parser.add_argument("--kills", type=int, default=3, help="of the engine host (%(default)s)")
    parser.add_argument("--restarts", type=int, default=1, help="by killing the stub (%(default)s)")
    parser.add_argument("--cancel-share", type=float, default=0.2, help="in every second round (%(default)s)")
    parser.add_argument(
        "--limit-s", type=float, default=120.0, help="a request, or a repair, takes no longer"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="the supervisor's note (.voltriton/run/serve-PORT.json)"
    )
    parser.add_argument(
        "--triton-faults", type=int, default=0, help="of Triton itself that are allowed (%(default)s)"
    )
    parser.add_argument("--report", type=Path, help="JSON file (default: standard output)")
    return Options(**vars(parser.parse_args(argv)))


def main(argv: list[str]) -> int:
    options = parse(argv)
    report = asyncio.run(Soak(options).run())
    text = json.dumps({"options": asdict(options), **asdict(report)}, indent=2, default=str)
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(text + "\n")
    else:
        print(text)
    for problem in report.problems:
        print(f"soak: {problem}", file=sys.stderr)
    print(
        f"soak: {report.seconds:.0f} s, {sum(report.outcomes.values())} requests, {report.tokens} tokens, "
        f"{len(report.faults)} faults made, {len(report.triton_faults)} of Triton itself, "
        f"{len(report.problems)} problems",
        file=sys.stderr,
    )
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
