# SPDX-License-Identifier: Apache-2.0
"""What looking costs: a server with metrics, page and a viewer against one without.

    python -m benchmarks.observe_cost                   requests a second, on the host
    python -m benchmarks.observe_cost --model 135m      the same with the geometry of SmolLM2-135M
    python -m benchmarks.observe_cost --device cuda     the decode step, Llama-3-8B geometry with dummy weights
    python -m benchmarks.observe_cost --of ours         our metrics and page alone, SGLang's metrics on both
    python -m benchmarks.observe_cost --of stock        what SGLang's own metrics cost without this plugin
    python -m benchmarks.observe_cost --of nothing      on against on

One server with `--enable-metrics --vattn-page` takes turns with itself. In the turns of `on` a viewer asks for
`/vattn/state` once a second, as the page does, and a scraper for `/metrics` every five. In those of `off` nobody looks,
and what `--of` names does nothing (`switched_server.py`): two processes differ by some percent, which is more than
looking costs. With ``--of nothing`` both are on: how sure the others are. A step of the tiny model is all Python: there
looking weighs most.

The figure is the median over the rounds of on / off. A round is a few turns each, a burst of requests a turn: on a
host, whose processors are faster and slower from one second to the next, short ones; of the tiny model as many as add
up to the scraper's five seconds. On the GPU one request of the burst is streamed, and tells the decode step. On a host
the scheduler's processor time bounds the requests a second, so it is taken too; and the scheduler counts itself how
much of it looking takes, which no noise disturbs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks import switched_server
from benchmarks.arms import HOST_POOL, MODELS, SMOLLM2_135M, GpuServer, counters, dummy_llama, model_for
from benchmarks.common import RESULTS, ROOT, ResultFile, Row, median, median_interval
from benchmarks.switched_server import LAG_S, SWITCH, SWITCHED
from tests.support.client import Client
from tests.support.server import NO_PLUGINS, Server, python_path

Looks = Mapping[str, float]  # who asks for what: a path, every so many seconds


class Pair(NamedTuple):
    """A server, what is switched off in the turns of `off`, and who looks in either's."""

    flags: tuple[str, ...]
    env: Mapping[str, str]
    switched: str
    looks: Mapping[str, Looks]


VATTN, METRICS, SCRAPED = "--kv-backend=vattn", "--enable-metrics", {"/metrics": 5.0}
_FLAGS = (VATTN, METRICS, "--vattn-page")
_VIEWED = {"/vattn/state": 1.0, **SCRAPED}
PAIRS = {
    "all": Pair(_FLAGS, {}, "all", {"off": {}, "on": _VIEWED}),
    "ours": Pair(_FLAGS, {}, "ours", {"off": SCRAPED, "on": _VIEWED}),
    "stock": Pair((METRICS,), NO_PLUGINS, "all", {"off": {}, "on": SCRAPED}),
    "nothing": Pair(_FLAGS, {}, "nothing", {"off": _VIEWED, "on": _VIEWED}),
}
Prompts = list[list[int]]


class Load(NamedTuple):
    """So many turns a round, a turn a burst of so many requests: a document and an end of its own each."""

    turns: int
    requests: int
    documents: int
    document_tokens: int
    question: int
    output: int  # tokens a request
    flags: tuple[str, ...]
    streamed: bool = False  # one of the requests


LOADS = {
    "tiny": Load(12, 16, 4, 400, 40, 32, (HOST_POOL, "--max-running-requests=48", "--page-size=16")),
    "135m": Load(12, 2, 2, 400, 40, 4, ("--max-total-tokens=16384", "--page-size=16", "--load-format=dummy")),
    "8b": Load(1, 64, 8, 2048, 64, 400, ("--max-total-tokens=262144", "--cuda-graph-max-bs-decode=64"), True),
}
VOCABULARY = {"tiny": 250, "135m": 49_000, "8b": 120_000}
MODEL = {"cpu": "tiny", "cuda": "8b"}  # unless another is asked for


def server(pair: Pair, model: str, folder: Path, path: Path, seconds: float) -> Server:
    flags = [*pair.flags, *LOADS[model].flags]
    env = {**pair.env, "PYTHONPATH": python_path(ROOT), SWITCH: str(path), SWITCHED: pair.switched}
    command = ("-m", switched_server.__name__)
    if model == "8b":
        return GpuServer(model_for("cuda"), folder, flags, env, command, seconds)
    weights = dummy_llama(MODELS / "dummy-smollm2-135m", SMOLLM2_135M) if model == "135m" else model_for("cpu")
    return Server(weights, folder, flags, env, command, lifetime_s=seconds)


def switch(path: Path, off: bool) -> None:
    """Of a server, off or on; waits until it is."""
    if path.exists() != off:
        if off:
            path.touch()
        else:
            path.unlink()
        time.sleep(2 * LAG_S)


class Watcher:
    """Somebody looks at the page, and Prometheus scrapes: each at its interval, of the time that is watched."""

    def __init__(self, client: Client, looks_s: Mapping[str, float]) -> None:
        self.client, self.looks_s = client, looks_s
        self.watched_s = 0.0
        self._due_s = dict.fromkeys(looks_s, 0.0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        over, began = threading.Event(), time.monotonic() - self.watched_s

        def look() -> None:
            while True:
                for path, every_s in self.looks_s.items():
                    if time.monotonic() - began >= self._due_s[path]:
                        self._due_s[path] += every_s
                        self.client.text(path)
                if over.wait(max(0.0, min(self._due_s.values()) - (time.monotonic() - began))):
                    return

        viewer = threading.Thread(target=look if self.looks_s else over.wait)
        viewer.start()
        try:
            yield
        finally:
            self.watched_s = time.monotonic() - began
            over.set()
            viewer.join()


class Bursts:
    """Prompts of the same documents, each with an end of its own, so that no turn finds another's in the cache."""

    def __init__(self, load: Load, vocabulary: int) -> None:
        self.load, self.vocabulary = load, vocabulary
        self.random = random.Random(0)
        self.documents = [self.tokens(load.document_tokens) for _ in range(load.documents)]

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(10, self.vocabulary) for _ in range(count)]

    def prompts(self) -> Prompts:
        return [
            self.documents[i % self.load.documents] + self.tokens(self.load.question) for i in range(self.load.requests)
        ]


class Burst(NamedTuple):
    seconds: float  # until all have answered
    step_s: float | None = None  # between two tokens of the streamed request, if there is one


def burst(client: Client, prompts: Prompts, load: Load) -> Burst:
    began = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(client.together, prompts[1:] if load.streamed else prompts, load.output)
        came = arrivals(client, prompts[0], load.output) if load.streamed else []
        answered = [len(answer.output) for answer in others.result()] + [count for _, count in came[-1:]]
    seconds = time.perf_counter() - began
    assert answered == [load.output] * load.requests, f"not {load.output} tokens for each: {answered}"
    return Burst(seconds, step_s(came) if load.streamed else None)


def arrivals(client: Client, prompt: Sequence[int], output: int) -> list[tuple[float, int]]:
    """When something of a streamed answer came, and how many tokens there were then."""
    return [(time.perf_counter(), len(answer.output)) for answer in client.stream(prompt, output)]


def step_s(came: Sequence[tuple[float, int]]) -> float:
    """Seconds a token, by :func:`arrivals`. Of the last three quarters: then all requests decode."""
    last_s, last = came[-1]
    first_s, first = next(one for one in came if one[1] >= last // 4)
    if first == last:
        raise ValueError(f"the stream's last three quarters came at once: {came}")
    return (last_s - first_s) / (last - first)


def processor_s(pid: int) -> float:
    """Of all threads of a process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class Turn(NamedTuple):
    burst: Burst
    processor_s: float  # the scheduler's


def take_turn(client: Server, prompts: Prompts, load: Load) -> Turn:
    scheduler = client.scheduler_pid()
    before_s = processor_s(scheduler)
    taken = burst(client, prompts, load)
    return Turn(taken, processor_s(scheduler) - before_s)


def figures(turns: Sequence[Turn], load: Load) -> Row:
    """Of a server's turns in one round."""
    requests = load.requests * len(turns)
    row = {
        "requests_per_s": requests / sum(turn.burst.seconds for turn in turns),
        "processor_ms_per_request": sum(turn.processor_s for turn in turns) / requests * 1e3,
    }
    steps = [turn.burst.step_s for turn in turns if turn.burst.step_s is not None]
    return row | ({"decode_step_ms": sum(steps) / len(steps) * 1e3} if steps else {})


def looking_s(client: Client) -> tuple[float, float]:
    """Processor seconds of the scheduler for metrics and log, and for the page, as it counts them itself; stock: 0."""
    facts = counters(client)
    return facts.get("observe_ns", 0) / 1e9, facts.get("state_ns", 0) / 1e9


def run(args: argparse.Namespace) -> Iterator[Row]:
    """The row, better with each round."""
    load, pair = LOADS[args.model], PAIRS[args.of]
    bursts = Bursts(load, VOCABULARY[args.model])
    values: dict[str, list[Row]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as scratch:
        off = Path(scratch) / "off"
        with server(pair, args.model, Path(scratch), off, args.seconds + 600) as client:
            take_turn(client, bursts.prompts(), load)
            watchers = {name: Watcher(client, looks) for name, looks in pair.looks.items()}
            before = looking_s(client)
            began = time.perf_counter()
            for number in range(args.rounds):
                if number >= 4 and time.perf_counter() - began > args.seconds:
                    break
                turns: dict[str, list[Turn]] = {"off": [], "on": []}
                for turn in range(load.turns):
                    for name in ("off", "on") if (number + turn) % 2 else ("on", "off"):
                        switch(off, name == "off")
                        with watchers[name].watching():
                            turns[name].append(take_turn(client, bursts.prompts(), load))
                for name, taken in turns.items():
                    values[name].append(figures(taken, load))
                looked_s = sum(
                    watcher.watched_s for name, watcher in watchers.items() if pair.looks[name] == pair.looks["on"]
                )
                spent = zip(("metrics", "page"), before, looking_s(client), strict=True)
                shares = {what: (now - then) / looked_s for what, then, now in spent}
                if number:
                    yield summary(args, load, values, shares)


def on_by_off(values: Mapping[str, Sequence[Row]], what: str) -> list[float]:
    """A figure's ratio in each round."""
    return [on[what] / off[what] for on, off in zip(values["on"], values["off"], strict=True)]


def summary(args: argparse.Namespace, load: Load, values: dict[str, list[Row]], shares: dict[str, float]) -> Row:
    row: Row = {
        "of": args.of,
        "model": args.model,
        "device": args.device,
        "load": load._asdict(),
        "rounds": len(values["on"]),
        "scheduler_share": shares,
    }
    for what in values["on"][0]:
        first, middle, third = statistics.quantiles(on_by_off(values, what), n=4)
        row[what] = {
            **{name: median([each[what] for each in values[name]]) for name in values},
            "on_by_off": middle,
            "quartiles": [first, third],
        }
    return row | {"raw": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(MODEL), default="cpu")
    parser.add_argument("--model", choices=list(LOADS), help="default: tiny, and on a GPU 8b")
    parser.add_argument("--of", choices=list(PAIRS), default="all", help="what is on or off; default: metrics and page")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no other round after so long")
    parser.add_argument("--out", help="default: observe_cost.json among this device's results")
    args = parser.parse_args()
    args.model = args.model or MODEL[args.device]
    if (args.model == "8b") != (args.device == "cuda"):
        parser.error(f"--model {args.model} is not for --device {args.device}: 8b is for cuda, the others for cpu")
    if args.rounds < 2:
        parser.error("--rounds: at least 2, for there are quartiles")
    folder = "h200" if args.device == "cuda" else "cpu"
    out = Path(args.out) if args.out else RESULTS / folder / "observe_cost.json"
    results = ResultFile(out, "observe_cost", ["of", "model"], device=args.device, resume=True)
    for row in run(args):
        results.add(row)
    shares = ", ".join(f"{what} {share:.2%}" for what, share in row["scheduler_share"].items())
    print(f"{row['rounds']} rounds; of the scheduler's time, by its own count: {shares}")
    for what in row["raw"]["on"][0]:
        figure, (low, high) = row[what], median_interval(on_by_off(row["raw"], what))
        print(
            f"{what}: on {figure['on']:.3f}, off {figure['off']:.3f}, "
            f"on / off {figure['on_by_off']:.4f} ({low:.4f} to {high:.4f}, 95 %)"
        )


if __name__ == "__main__":
    main()
