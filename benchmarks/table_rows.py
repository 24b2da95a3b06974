# SPDX-License-Identifier: Apache-2.0
"""One function a table: the result of a benchmark as rows of text, the head first."""

from __future__ import annotations

from typing import Any

from benchmarks.beside import by_round
from benchmarks.common import median, median_interval, quartile_spread, stated
from benchmarks.observe_cost import on_by_off
from benchmarks.ratios import OURS, STOCK, against_stock
from benchmarks.steady import lost_to_mapping

Result = dict[str, Any]
Rows = list[list[str]]

WORKLOADS = {
    "prefix_8k_x64": "one 8k prefix, 64 requests",
    "docs_8x8k_x64": "8 documents of 8k, 64 requests",
    "prefix_2k_x128": "one 2k prefix, 128 requests",
    "prefix_32k_x32": "one 32k prefix, 32 requests",
    "unique_4k_x32": "nothing shared, 32 x 4k",
}


def number(value: float, digits: int = 3) -> str:
    """So many significant digits, no exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def within(value: float, spread: float | None, digits: int = 3) -> str:
    """With its spread, or without one where it was measured once."""
    return number(value, digits) + (f" ({stated(spread):.0%})" if spread is not None else "")


def _arms(result: Result, names: dict[str, str]) -> Rows:
    rows = [["workload", "arm", "cold prefill, s", "hit prefill, s", "decode step, ms", "output tok/s", "one hit, ms"]]
    found = {(row["workload"], row["arm"]): row for row in result["rows"]}
    for workload, title in WORKLOADS.items():
        for arm, label in names.items():
            if (row := found.get((workload, arm))) is None:
                continue
            spread = row["spread"]
            rows.append([
                title, label,
                within(row["cold_prefill_s"], spread["cold_prefill_s"]),
                within(row["hit_prefill_s"], spread["hit_prefill_s"]),
                within(row["decode_step_ms"], spread["decode_step_ms"]),
                within(row["out_tok_s"], spread["with_output_s"], 4),
                within(row["one_hit_ttft_ms"], spread["one_hit_s"]),
            ])  # fmt: skip
    return rows


def serve_ab(result: Result) -> Rows:
    return _arms(result, {"stock_page1": "stock, page 1", "stock_page128": "stock, page 128", "vattn": "**vattn**"})


def first_token(result: Result) -> Rows:
    kinds = {"burst": "burst of 64 hits, ms", "lone": "lone hit, ms"}
    stock = [row for row in result["rows"] if row["arm"] in STOCK]
    rows = [
        ["arm", *(head for kind in kinds.values() for head in (kind, "over stock's better, by round (sure to 95 %)"))]
    ]
    for row in result["rows"]:
        cells = [row["arm"].replace("_", " ")]
        for kind in kinds:
            figure = f"{kind}_ms"
            cells += [within(row[figure], row["spread"][figure]), ""]
            if row["arm"] == OURS and stock:
                ratios = by_round(row, min(stock, key=lambda one: one[figure]), kind)
                low, high = median_interval(ratios)
                cells[-1] = f"{median(ratios):.3f} ({low:.3f} to {high:.3f})"
        rows.append(cells)
    return rows


def steady(result: Result) -> Rows:
    """Times are medians over the requests, with the quartiles of those as spread."""
    rows = [["arm", "output tok/s", "decode step, ms", "TTFT, ms", "batches by rows", "map calls a request",
             "unmap calls", "of these while requests ran", "GPU time lost to mapping"]]  # fmt: skip
    for row in result["rows"]:
        spreads = [quartile_spread([each[name] for each in row["raw"]]) for name in ("step_s", "ttft_s")]
        times = zip(("decode_step_ms", "ttft_ms"), spreads, strict=True)
        cells = [number(row["out_tok_s"], 4), *(within(row[name], spread) for name, spread in times)]
        if counters := row["counters"]:
            by_rows = counters["batches_rows"] + counters["batches_shared"]
            cells += [
                f"{by_rows / (by_rows + counters['batches_pages']):.1%}",
                f"{counters['map_calls'] / row['requests']:.1f}", str(counters["unmap_calls"]),
                str(counters["unmap_calls_running"]), f"{lost_to_mapping(row):.2%}",
            ]  # fmt: skip
        else:
            cells += [""] * 5
        rows.append([row["arm"].replace("_", " "), *cells])
    return rows


def scrub_cost(result: Result) -> Rows:
    kinds = {"one_8k_ms": "a prompt of 8k tokens, ms", "sixteen_512_ms": "16 of 512 at once, ms"}
    off = result["rows"][0]
    rows = [["", *(head for kind in kinds.values() for head in (kind, "of without")), "pages scrubbed"]]
    for row in result["rows"]:
        cells = [(within(row[kind], row["spread"][kind], 4), f"{row[kind] / off[kind]:.4f}") for kind in kinds]
        label = "`--vattn-scrub`" if row["pages_scrubbed"] else "without"
        rows.append([label, *(cell for pair in cells for cell in pair), f"{row['pages_scrubbed']:,}"])
    return rows


def layouts(result: Result) -> Rows:
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["us"]))
    rows = [["call, us a layer", "by", *names, "bytes at 4.5 TB/s"]]
    for row in result["rows"]:
        times = [number(row["us"][name], 4) if name in row["us"] else "" for name in names]
        rows.append([row["case"], row["by"], *times, number(row["floor_us"]) if "floor_us" in row else ""])
    return rows


def two_level_orders(result: Result) -> Rows:
    names = list(result["rows"][0]["us"])
    rows = [["us a layer", *(row["load"] for row in result["rows"])]]
    rows += [[name, *(number(row["us"][name], 4) for row in result["rows"])] for name in names]
    return rows


def observe_cost(result: Result) -> Rows:
    names = {
        "requests_per_s": "requests a second",
        "decode_step_ms": "decode step, ms",
        "processor_ms_per_request": "scheduler's processor time a request, ms",
    }
    of = {
        "all": "SGLang's metrics, ours, the page",
        "ours": "ours and the page",
        "stock": "SGLang's metrics, stock server",
    }
    models = {"tiny": "tiny, 4 layers", "135m": "SmolLM2-135M", "8b": "Llama-3-8B"}
    rows = [["model", "on or off", "", "off", "on", "on / off, median of rounds", "sure to 95 %", "quartiles",
             "rounds"]]  # fmt: skip
    for row in result["rows"]:
        for name, label in names.items():
            if name not in row:
                continue
            figure = row[name]
            sure, quartiles = (
                " to ".join(f"{value:.4f}" for value in values)
                for values in (median_interval(on_by_off(row["raw"], name)), figure["quartiles"])
            )
            rows.append([
                models[row["model"]], of[row["of"]], label, number(figure["off"], 4), number(figure["on"], 4),
                f"{figure['on_by_off']:.4f}", sure, quartiles, str(row["rounds"]),
            ])  # fmt: skip
    return rows


def trace_replay(result: Result) -> Rows:
    arms = list(dict.fromkeys(row["arm"] for row in result["rows"]))
    rows = [["pool, tokens", *(arm.replace("_", " ") for arm in arms), "ideal", "skipped"]]
    for pool in dict.fromkeys(row["pool_tokens"] for row in result["rows"]):
        found = {row["arm"]: row for row in result["rows"] if row["pool_tokens"] == pool}
        any_arm = next(iter(found.values()))
        rates = [f"{found[arm]['hit_rate']:.5f} ({found[arm]['hit_tokens']:,})" if arm in found else "" for arm in arms]
        rows.append([f"{pool:,}", *rates, f"{any_arm['ideal_hit_rate']:.3f}", str(any_arm["skipped"])])
    return rows


def trace_cost(result: Result) -> Rows:
    rows = [["pool, tokens", "arm", "tokens copied", "pages wasted", "tokens evicted", "map calls", "pages mapped",
             "unmap calls", "us of CPU a request", "replay, s"]]  # fmt: skip
    for row in result["rows"]:
        if row["arm"] in ("vattn", "stock_page1"):
            rows.append([
                f"{row['pool_tokens']:,}", row["arm"].replace("_", " "), f"{row['tokens_copied']:,}",
                f"{row['wasted_share']:.2%}", f"{row['tokens_evicted']:,}",
                *(f"{row[name]:,}" if name in row else "" for name in ("map_calls", "pages_mapped", "unmap_calls")),
                number(row["cpu_us_per_request"]), number(row["replay_s"]),
            ])  # fmt: skip
    return rows


def trace_live(result: Result) -> Rows:
    rows = [["arm", "window, s", "speed", "answered", "hit rate", "TTFT, ms", "p99", "decode step, ms", "output tok/s"]]
    for row in result["rows"]:
        rows.append([
            row["arm"].replace("_", " "), f"{row['start_s']:.0f} + {row['seconds']:.0f}", number(row["speed"]),
            f"{row['answered']} of {row['requests']}", f"{row['hit_rate']:.4f}",
            within(row["ttft_ms"], row["spread"]["ttft_ms"]), number(row["ttft_p99_ms"]),
            within(row["decode_step_ms"], row["spread"]["decode_step_ms"]), number(row["tokens_per_s"], 4),
        ])  # fmt: skip
    return rows


def tree(result: Result) -> Rows:
    rows = [["operation", "tokens", "stock, us", "vattn, us", "faster by"]]
    for row in result["rows"]:
        times = [within(row["us"][arm], row["spread"][arm]) for arm in ("stock", "vattn")]
        rows.append([row["operation"], f"{row['tokens']:,}", *times, f"{row['speedup']:.2f}"])
    return rows


def kernels_host(result: Result) -> Rows:
    rows = [["heads", "kind", "new", "context", "stock, ms", "rows, ms", "home slots, ms", "faster by"]]
    for row in result["rows"]:
        times = [within(row["ms"][a], row["spread"][a]) if a in row["ms"] else "" for a in ("stock", "rows", "pages")]
        rows.append([row["heads"], row["kind"], str(row["new"]), f"{row['context']:,}", *times,
                     f"{row['speedup']:.2f}"])  # fmt: skip
    return rows


def _kernel_table(found: list[dict[str, Any]], with_kernel: bool) -> Rows:
    arms = list(dict.fromkeys(arm for row in found for arm in row["ms"]))
    rows = [[*(["kernel"] if with_kernel else []), "case", *(arm.replace("_", " ") for arm in arms)]]
    if any("floor_ms" in row for row in found):
        rows[0].append("unique bytes at 4.5 TB/s")
    for row in found:
        times = [within(row["ms"][arm], row["spread"][arm]) if arm in row["ms"] else "" for arm in arms]
        floor = [number(row["floor_ms"])] if "floor_ms" in row else []
        rows.append([*([row["kernel"]] if with_kernel else []), row["case"], *times, *floor])
    return rows


def kernels_cuda(result: Result) -> Rows:
    return _kernel_table([row for row in result["rows"] if row["kind"] != "shared"], True)


def kernels_shared(result: Result) -> Rows:
    return _kernel_table([row for row in result["rows"] if row["kind"] == "shared"], False)


def vmm(result: Result) -> Rows:
    rows = [["part", "case", "result"]]
    for row in result["rows"]:
        shown = []
        for name, value in row.items():
            if isinstance(value, float):
                unit = (
                    name.replace("_per_s", "/s").replace("us_per_page", "us a page").replace("us_per_call", "us a call")
                )
                text = unit.replace("_", " ")
                shown.append(f"{text} {within(value, row['spread'].get(name))}")
        rows.append([row["part"], row["case"], ", ".join(shown)])
    return rows


def prefix_hit(result: Result) -> Rows:
    rows = [["sweep", "value", "arm", "cold TTFT, ms", "TTFT, ms", "decode step, ms", "over stock", "output tok/s",
             "over stock", "hits", "tokens held", "map calls", "unmap calls"]]  # fmt: skip
    ratios = {(row["sweep"], row["value"]): row for row in against_stock(result["rows"], ("arm", "sweep", "value"))}
    order = list(dict.fromkeys((row["sweep"], str(row["value"])) for row in result["rows"]))
    for row in sorted(result["rows"], key=lambda row: order.index((row["sweep"], str(row["value"])))):
        spread = row["spread"] if len(row["raw"]) > 1 else {}
        timed = [within(row[name], spread.get(name)) for name in ("cold_ttft_ms", "ttft_ms", "decode_step_ms")]
        ratio = ratios.get((row["sweep"], row["value"])) if row["arm"] == OURS else None
        step, rate = (
            within(ratio[name], ratio["spread"][name] if len(ratio["raw"][name]) > 1 else None) if ratio else ""
            for name in ("decode_step_ms", "tokens_per_s")
        )
        rows.append([
            row["sweep"], "uniform" if row["value"] is None else str(row["value"]), row["arm"].replace("_", " "),
            *timed, step, within(row["tokens_per_s"], spread.get("tokens_per_s"), 4), rate, f"{row['hit_share']:.3f}",
            f"{row['most_tokens_used']:,.0f}", f"{row['map_calls']:,.0f}", f"{row['unmap_calls']:,.0f}",
        ])  # fmt: skip
    return rows
