# SPDX-License-Identifier: Apache-2.0
"""``python -m sglang_vattn top URL``: the pool in a terminal, live. Needs rich."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sglang_vattn.observe.client import Unreachable, View, fetch, rate
from sglang_vattn.observe.colors import DARK as THEME

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

LOWER_HALF = "▄"  # two pages a character: upper one as background, lower one as foreground
RATES = (
    ("hit tokens/s, aliased", "aliased_tokens"),
    ("hit tokens/s, copied", "copied_tokens"),
    ("pages mapped/s", "pages_mapped"),
    ("batches/s by rows", "batches_rows"),
    ("batches/s by pages", "batches_pages"),
    ("batches/s shared", "batches_shared"),
)


def run(url: str, api_key: str | None, rank: int, interval_s: float, once: bool) -> int:
    """Show until interrupted, or ``once``; the exit code."""
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        print("error: top needs rich: pip install rich")
        return 2
    console = Console()
    try:
        if once:
            console.print(render(fetch(url, api_key, rank), url, console))
            return 0
        view = fetch(url, api_key, rank)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    view = fetch(url, api_key, rank)
                    live.update(render(view, url, console), refresh=True)
                except Unreachable as error:  # a restart: keep waiting
                    live.update(Text(f"{error}\nwaiting; Ctrl-C ends"), refresh=True)
                time.sleep(interval_s)
    except Unreachable as error:
        console.print(f"error: {error}", style="bold red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        return 0


def render(view: View, url: str, console: Console) -> RenderableType:
    """The whole screen."""
    from rich.console import Group
    from rich.text import Text

    width, height = console.width, console.height
    parts: list[RenderableType] = [_head(view, url), _states(view, width)]
    if not view.detailed:
        parts.append(Text("start the server with --vattn-page to see pages, rows and the prefix tree", THEME.soft))
        return Group(*parts)
    room = max(6, height - 7)  # lines left for the map, the rows and the tree
    pages = _map(view, width, max(2, room // 3))
    rows = _rows(view, width, max(2, (room - len(pages)) // 2))
    parts += [_rates(view, width), *pages, *rows, *_tree(view, max(2, room - len(pages) - len(rows)))]
    return Group(*parts)


def _head(view: View, url: str) -> Text:
    from rich.text import Text

    facts = view.facts
    shared, holders = facts["shared_pages"], facts["shared_page_holders"]
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("vattn ", "bold")
    text.append(f"{url}  pages {facts['num_pages'] - facts['free']}/{facts['num_pages']}")
    text.append(f", shared {shared} x {holders / max(1, shared):.1f}")
    text.append(f", rows {facts['rows_ready']} of {facts['requests']} ready, aliases {facts['mappings']}")
    text.append(f", queued {facts['queued_jobs']}, waste {facts['waste_tokens']} tokens", THEME.soft)
    return text


def _states(view: View, width: int) -> Text:
    """A bar of the pool by state, and its numbers."""
    from rich.text import Text

    facts, text = view.facts, Text(no_wrap=True, overflow="ellipsis")
    names = ("private", "protected", "evictable", "free")
    colors = (THEME.private, THEME.protected, THEME.evictable, THEME.free)
    bar = max(10, min(40, width - 70))
    done = drawn = 0
    for name, color in zip(names, colors, strict=True):
        done += facts[name]
        end = round(done * bar / max(1, facts["num_pages"]))
        text.append(" " * (end - drawn), f"on {color}")
        drawn = end
    for name, color in zip(names, colors, strict=True):
        text.append(f"  {name} {facts[name]}", color if name != "free" else THEME.soft)
    return text


def _rates(view: View, width: int) -> Text:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    for label, fact in RATES:
        text.append(f"{label} ", THEME.soft)
        text.append(f"{rate(view.history, fact):.0f}  ")
    return text


def _map(view: View, width: int, lines: int) -> list[Text]:
    """All pages, two a character; several pages share a place where there are more than places."""
    from rich.text import Text

    places = width * lines * 2
    usable = view.states[1:-1]  # without the padding page and the guard page
    step = max(1, -(-len(usable) // places))
    shown = [max(usable[i : i + step]) for i in range(0, len(usable), step)]
    out = [Text(f"pages{f', {step} a mark' if step > 1 else ''}", "bold")]
    for start in range(0, len(shown), 2 * width):
        line = Text(no_wrap=True)
        upper, lower = shown[start : start + width], shown[start + width : start + 2 * width]
        for index, state in enumerate(upper):
            if index < len(lower):
                line.append(LOWER_HALF, f"{THEME.state(lower[index])} on {THEME.state(state)}")
            else:
                line.append("▀", THEME.state(state))
        out.append(line)
    return out


def _rows(view: View, width: int, lines: int) -> list[Text]:
    """The longest rows: shared pages in their prefix's colour, then its own."""
    from rich.text import Text

    rows = sorted(view.rows, key=lambda row: -len(row.pages))
    longest = max((len(row.pages) for row in rows), default=1)
    step = -(-longest // max(10, width - 24))
    out = [Text(f"rows: {len(rows)} requests{f', {step} pages a mark' if step > 1 else ''}", "bold")]
    for row in rows[: lines - 1]:
        line = Text(f"{row.tokens:>8} tokens {'' if row.ready else '…':1}  ", no_wrap=True)
        own = len(row.pages) - row.ahead
        for at in range(0, len(row.pages), step):
            color = THEME.prefix(view.nodes[row.pages[at]]) if at < row.shared else THEME.private
            line.append("■", color if at < own else THEME.edge)
        out.append(line)
    return out


def _tree(view: View, lines: int) -> list[Text]:
    from rich.text import Text

    facts = view.facts
    out = [Text(f"prefix tree: {facts['tree_nodes']} nodes, {facts['cached_tokens']} tokens", "bold")]
    children: dict[int, list[dict[str, int]]] = {}
    for node in view.tree:
        children.setdefault(node["parent"], []).append(node)
    stack = [(node, 0) for node in reversed(children.get(0, []))]
    while stack and len(out) < lines:
        node, depth = stack.pop()
        line = Text("  " * depth, no_wrap=True, overflow="ellipsis")
        line.append("■ ", THEME.prefix(node["id"]))
        line.append(f"tokens {node['start']}-{node['end']}")
        line.append(f"  {node['pages']} pages, {node['hits']} hits, {node['locks']} running", THEME.soft)
        out.append(line)
        stack += [(child, depth + 1) for child in reversed(children.get(node["id"], []))]
    return out
