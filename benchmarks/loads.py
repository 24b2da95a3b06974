# SPDX-License-Identifier: Apache-2.0
"""SGLang's bench_serving, run in this process, and what a server holds meanwhile."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import random
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from tests.support.client import Client

if TYPE_CHECKING:
    from benchmarks.prefix_hit import Load


def arguments(url: str, model: Path, load: Load, seed: int, out: Path) -> list[str]:
    """bench_serving's flags for a load."""
    flags = [
        "--backend=sglang", f"--base-url={url}", f"--model={model}", f"--tokenizer={model}",
        "--dataset-name=generated-shared-prefix", "--tokenize-prompt",
        f"--gsp-num-groups={load.prefixes}", f"--gsp-prompts-per-group={load.members}",
        f"--gsp-system-prompt-len={load.prefix}", f"--gsp-question-len={load.own}",
        f"--gsp-output-len={load.output}", f"--seed={seed}", f"--output-file={out}", "--output-details",
        "--cache-report", "--disable-tqdm", "--warmup-requests=0", "--ready-check-timeout-sec=10",
    ]  # fmt: skip
    if load.zipf is not None:
        flags += ["--gsp-group-distribution=zipf", f"--gsp-zipf-alpha={load.zipf}"]
    if isinstance(load.arrival, float):
        flags.append(f"--request-rate={load.arrival}")
    elif load.arrival == "one by one":
        flags.append("--max-concurrency=1")
    return flags


@cache
def _bench() -> Any:
    """The module of bench_serving. It imports Hugging Face's datasets, for one load of pictures alone."""
    if "datasets" not in sys.modules and importlib.util.find_spec("datasets") is None:
        absent = ModuleType("datasets")
        absent.load_dataset = None  # type: ignore[attr-defined]
        sys.modules["datasets"] = absent
    from sglang.benchmark import serving

    serving.get_tokenizer = cache(serving.get_tokenizer)  # a second of loading for every load otherwise
    return serving


@contextlib.contextmanager
def _home(folder: Path) -> Iterator[None]:
    """bench_serving keeps generated prompts under $HOME by sizes and seed, whatever the vocabulary."""
    home = os.environ.get("HOME", "")
    os.environ["HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ["HOME"] = home


def prefixes(model: Path, load: Load, seed: int, scratch: Path) -> list[list[int]]:
    """The prefixes that `bench_serving` will send for this load and seed: it finds the same prompts in its cache."""
    tokenizer = _bench().get_tokenizer(str(model))
    import numpy
    from sglang.benchmark.datasets.generated_shared_prefix import sample_generated_shared_prefix_requests

    random.seed(seed)
    numpy.random.seed(seed)
    said = io.StringIO()
    with _home(scratch), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        requests = sample_generated_shared_prefix_requests(
            num_groups=load.prefixes, prompts_per_group=load.members, system_prompt_len=load.prefix,
            question_len=load.own, output_len=load.output, range_ratio=1.0, tokenizer=tokenizer, seed=seed,
            group_distribution="uniform" if load.zipf is None else "zipf", zipf_alpha=load.zipf, input_ids=True,
        )  # fmt: skip
    return [list(prefix) for prefix in dict.fromkeys(tuple(request.prompt[: load.prefix]) for request in requests)]


def bench_serving(url: str, model: Path, load: Load, seed: int, scratch: Path) -> dict[str, Any]:
    """Run the load; bench_serving's own result, with a list a request of what it measured."""
    cli_main = _bench().cli_main
    out, log = scratch / "bench_serving.jsonl", scratch / "bench_serving.log"
    out.unlink(missing_ok=True)
    argv = sys.argv
    sys.argv = ["bench_serving", *arguments(url, model, load, seed, out)]
    try:
        with (
            _home(scratch),
            log.open("w") as stream,
            contextlib.redirect_stdout(stream),
            contextlib.redirect_stderr(stream),
        ):
            cli_main()
    except SystemExit as stop:
        raise RuntimeError(f"bench_serving stopped with {stop.code}: {log.read_text()[-2000:]}") from stop
    finally:
        sys.argv = argv
    result: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return result


def used_tokens(client: Client) -> int:
    """Slots that running requests hold, in whole pages; what only the cache holds is not counted."""
    loads = json.loads(client.text("/v1/loads?include=core"))["loads"]
    return int(loads[0]["num_used_tokens"])


class Sampler:
    """The most tokens that running requests held during the load, looked at five times a second."""

    def __init__(self, client: Client, every_s: float = 0.2) -> None:
        self.client, self.every_s, self.most = client, every_s, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(self.every_s):
            with contextlib.suppress(OSError):  # busy: look again
                self.most = max(self.most, used_tokens(self.client))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
