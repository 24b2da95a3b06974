# SPDX-License-Identifier: Apache-2.0
"""`make demo`: questions about documents, served with `--kv-backend vattn` and by stock SGLang.

Both servers are real (SGLang's own launcher, scheduler and HTTP) and serve a tiny random model on
the CPU. Ends with 1 if a hit that had to be there is missing, if an answer differs from stock's,
or if the requests' pages and tokens do not add up to the server's own counters.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.retrieval import AT_ONCE, QUESTIONS, Document, Result, Run, documents
from tests.support.server import NO_PLUGINS, Server
from tests.support.tiny_model import tiny_model

MODELS = Path(__file__).resolve().parent.parent / "build" / "models"
POOL = "--max-total-tokens=65536"


class Arm(NamedTuple):
    """What one server did."""

    results: list[Result]
    seconds: float
    counted: dict[str, int]  # how far our server's counters moved; empty on stock

    def ttft_ms(self, hits: bool) -> float:
        return 1000 * mean(result.ttft_s for result in self.results if bool(result.expected) == hits)

    def total(self, of: Callable[[Result], int]) -> int:
        return sum(of(result) for result in self.results)


def own_count(result: Result, name: str) -> int:
    """A number that our server reports with each finished answer, as a list of one."""
    value = result.answer.meta.get(f"vattn_{name}", 0)
    return int(value[0] if isinstance(value, list) else value)


def pages_aliased(result: Result) -> int:
    return own_count(result, "pages_aliased")


def tokens_copied(result: Result) -> int:
    return own_count(result, "tokens_copied")


@contextmanager
def waiting(console: Console, text: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """A live line with the time that has passed; on a pipe, one line at the start."""
    if not console.is_terminal:
        console.print(text)
    columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    if total is not None:
        columns[2:2] = [BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=total)
        yield lambda: progress.advance(task)


def serve(
    console: Console, name: str, server: Server, library: list[Document], encode: Callable[[str], list[int]]
) -> Arm:
    with waiting(console, f"{name}: starting the server (about 20 s)"):
        server.start()
    try:
        ours = name == "vattn"
        server.flush()
        before = server.vattn() if ours else {}
        count = len(library) * (len(QUESTIONS) + 1)
        with waiting(console, f"{name}: {count} requests, {AT_ONCE} at a time", count) as done:
            run = Run(server, library, encode, done)
            results = run()
        after = server.vattn() if ours else {}
        server.assert_clean()
    finally:
        with waiting(console, f"{name}: stopping the server"):
            server.stop()
    moved = {key: after[key] - before[key] for key in ("pages_aliased", "tokens_copied", "hit_tokens") if ours}
    return Arm(results, run.seconds, moved | {key: after[key] for key in ("page_size", "num_pages", "free") if ours})


def request_table(ours: Arm, stock: Arm, library: list[Document]) -> Table:
    table = Table(title="One line a request", title_justify="left")
    for heading in ("document", "turn"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "prompt\ntokens",
        "cached\ntokens",
        "pages\naliased",
        "tokens\ncopied",
        "ms to first\ntoken",
        "stock:\ncached",
        "stock:\nms",
    ):
        table.add_column(heading, justify="right")
    for mine, theirs in zip(ours.results, stock.results, strict=True):
        table.add_row(
            library[mine.job.document].name,
            mine.job.turn,
            str(mine.answer.prompt_tokens),
            str(mine.answer.cached_tokens),
            str(pages_aliased(mine)),
            str(tokens_copied(mine)),
            f"{1000 * mine.ttft_s:.0f}",
            str(theirs.answer.cached_tokens),
            f"{1000 * theirs.ttft_s:.0f}",
        )
    return table


def summary_table(ours: Arm, stock: Arm) -> Table:
    table = Table(title="Summary", title_justify="left")
    table.add_column("")
    table.add_column("vattn", justify="right")
    table.add_column("stock, page size 1", justify="right")

    def row(label: str, value: Callable[[Arm], str]) -> None:
        table.add_row(label, value(ours), value(stock))

    row("prompt tokens", lambda arm: str(arm.total(lambda r: r.answer.prompt_tokens)))
    row("of them cached", lambda arm: str(arm.total(lambda r: r.answer.cached_tokens)))
    table.add_row("pages aliased", str(ours.total(pages_aliased)), "-")
    table.add_row("tokens copied", str(ours.total(tokens_copied)), "-")
    table.add_row("tokens a page", str(ours.counted["page_size"]), "1")
    row("mean ms to first token, document new", lambda arm: f"{arm.ttft_ms(hits=False):.0f}")
    row("mean ms to first token, document cached", lambda arm: f"{arm.ttft_ms(hits=True):.0f}")
    row("seconds in all", lambda arm: f"{arm.seconds:.1f}")
    return table


def problems(ours: Arm, stock: Arm) -> list[str]:
    """Everything that makes the demo fail."""
    found = []
    for name, arm in (("vattn", ours), ("stock", stock)):
        for result in arm.results:
            if result.answer.cached_tokens < result.expected:
                found.append(
                    f"{name}: {result.job.turn} on document {result.job.document} hit "
                    f"{result.answer.cached_tokens} tokens of {result.expected} that were there"
                )
    for mine, theirs in zip(ours.results, stock.results, strict=True):
        if mine.answer.output != theirs.answer.output:
            found.append(f"{mine.job.turn} on document {mine.job.document}: the answer differs from stock's")
    for counter, of in (("pages_aliased", pages_aliased), ("tokens_copied", tokens_copied)):
        if ours.total(of) != ours.counted[counter]:
            found.append(f"{counter}: requests say {ours.total(of)}, /server_info {ours.counted[counter]}")
    if ours.total(pages_aliased) == 0:
        found.append("no page was aliased")
    return found


def main(arguments: Sequence[str] = ()) -> int:
    if arguments:
        print(__doc__)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 110)
    with waiting(console, "writing the tiny model"):
        model = tiny_model(MODELS)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    library = documents(encode)
    with tempfile.TemporaryDirectory(prefix="vattn-demo-") as folder:
        logs = Path(folder)
        flagged = Server(model, logs / "vattn", ["--kv-backend=vattn", POOL], env={})
        ours = serve(console, "vattn", flagged, library, encode)
        plain = Server(model, logs / "stock", ["--page-size=1", POOL], env=NO_PLUGINS)
        stock = serve(console, "stock", plain, library, encode)
    console.print(request_table(ours, stock, library))
    console.print(summary_table(ours, stock))
    console.print("Times are those of a tiny model on the CPU; they tell nothing of a GPU.")
    found = problems(ours, stock)
    for problem in found:
        console.print(f"[red]FAILED[/red] {problem}")
    if not found:
        hits = sum(1 for result in ours.results if result.expected)
        console.print(f"All {hits} expected hits were there; all {len(ours.results)} answers equal stock SGLang's.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
