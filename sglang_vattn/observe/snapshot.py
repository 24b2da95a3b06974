# SPDX-License-Identifier: Apache-2.0
"""``python -m sglang_vattn snapshot URL out.svg``: the map as a picture. SVG is written directly, PNG with Pillow."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Protocol
from xml.sax.saxutils import escape

from sglang_vattn.observe.client import View
from sglang_vattn.observe.colors import Theme
from sglang_vattn.observe.page_states import STATES

WIDTH = 1200
MARGIN = 24
MAX_ROWS = 64


class Pen(Protocol):
    """What a picture is drawn with; pixels from the upper left corner."""

    def rectangle(self, x: float, y: float, width: float, height: float, color: str) -> None: ...

    def text(self, x: float, y: float, text: str, color: str, size: int = 13) -> None:
        """``y`` is the base line."""


class SvgPen:
    def __init__(self) -> None:
        self.parts: list[str] = []

    def rectangle(self, x: float, y: float, width: float, height: float, color: str) -> None:
        self.parts.append(f'<rect x="{x:.4g}" y="{y:.5g}" width="{width:.4g}" height="{height:.4g}" fill="{color}"/>')

    def text(self, x: float, y: float, text: str, color: str, size: int = 13) -> None:
        self.parts.append(f'<text x="{x:.4g}" y="{y:.5g}" fill="{color}" font-size="{size}">{escape(text)}</text>')

    def finish(self, height: float) -> bytes:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        head += f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="system-ui, DejaVu Sans, sans-serif">'
        return "\n".join([head, *self.parts, "</svg>\n"]).encode()


class PngPen:
    """At twice the size. The picture's height must be known first, so calls are kept until :meth:`finish`."""

    SCALE = 2

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def rectangle(self, x: float, y: float, width: float, height: float, color: str) -> None:
        self.calls.append((x, y, x + width, y + height, color))

    def text(self, x: float, y: float, text: str, color: str, size: int = 13) -> None:
        self.calls.append((x, y, text, color, size))

    def finish(self, height: float) -> bytes:
        from PIL import Image, ImageDraw, ImageFont

        scale = self.SCALE
        image = Image.new("RGB", (WIDTH * scale, round(height) * scale))
        draw = ImageDraw.Draw(image)
        for call in self.calls:
            if isinstance(call[2], str):
                x, y, text, color, size = call
                draw.text((x * scale, y * scale), text, color, ImageFont.load_default(size * scale), anchor="ls")
            else:
                *box, color = call
                draw.rectangle(
                    [round(box[0] * scale), round(box[1] * scale), *(round(e * scale) - 1 for e in box[2:])], color
                )
        out = io.BytesIO()
        image.save(out, "PNG", optimize=True)
        return out.getvalue()


def write(view: View, path: Path, theme: Theme) -> None:
    """Draw ``view`` into ``path``, as SVG or PNG by its suffix.

    Raises
    ------
    ValueError
        For another suffix, for a PNG without Pillow, or for a view without details.
    """
    if not view.detailed:
        raise ValueError("the server was started without --vattn-page: there is no map to draw")
    pen: SvgPen | PngPen
    if path.suffix == ".svg":
        pen = SvgPen()
    elif path.suffix == ".png":
        try:
            import PIL.Image  # noqa: F401
        except ImportError:
            raise ValueError("a PNG needs Pillow: pip install pillow, or write an .svg") from None
        pen = PngPen()
    else:
        raise ValueError(f"{path.name}: the name must end in .svg or .png")
    height = _height(view)
    pen.rectangle(0, 0, WIDTH, height, theme.paper)
    _draw(view, pen, theme)
    path.write_bytes(pen.finish(height))


def _cell(view: View) -> int:
    return max(3, min(26, int(((WIDTH - 2 * MARGIN) * 400 / len(view.states)) ** 0.5)))


def _map_height(view: View) -> int:
    columns = (WIDTH - 2 * MARGIN) // _cell(view)
    return -(-len(view.states) // columns) * _cell(view)


def _height(view: View) -> float:
    return 150 + _map_height(view) + 14 * min(MAX_ROWS, max(1, len(view.rows))) + MARGIN


def _draw(view: View, pen: Pen, theme: Theme) -> None:
    facts = view.facts
    shared, holders = facts["shared_pages"], facts["shared_page_holders"]
    pen.text(MARGIN, 36, "vattn", theme.ink, 18)
    pen.text(
        MARGIN,
        58,
        f"{facts['num_pages'] - facts['free']} of {facts['num_pages']} pages in use, {facts['page_size']} tokens each; "
        f"{facts['physical_bytes'] / 2**30:.2f} GiB; {shared} pages shared by {holders / max(1, shared):.1f} each; "
        f"{facts['mappings']} aliases; {facts['aliased_tokens'] + facts['copied_tokens']} hit tokens",
        theme.ink,
    )
    x = float(MARGIN)
    for index, name in enumerate(STATES[:4]):
        pen.rectangle(x, 72, 11, 11, theme.state(index))
        label = f"{name} {facts[name]}"
        pen.text(x + 17, 82, label, theme.soft)
        x += 36 + 7.5 * len(label)
    pen.text(x, 82, "inner square: shared, in the colour of its prefix", theme.soft)
    _draw_map(view, pen, theme, top=98)
    _draw_rows(view, pen, theme, top=98 + _map_height(view) + 34)


def _draw_map(view: View, pen: Pen, theme: Theme, top: float) -> None:
    size = _cell(view)
    columns, cell = (WIDTH - 2 * MARGIN) // size, size - (1 if size > 5 else 0.5)
    for page, state in enumerate(view.states):
        x, y = MARGIN + page % columns * size, top + page // columns * size
        pen.rectangle(x, y, cell, cell, theme.state(state))
        if view.sharers[page]:
            inset = max(1.0, cell / 4)
            pen.rectangle(x + inset, y + inset, cell - 2 * inset, cell - 2 * inset, theme.prefix(view.nodes[page]))


def _draw_rows(view: View, pen: Pen, theme: Theme, top: float) -> None:
    rows = view.rows[:MAX_ROWS]
    more = f", the first {MAX_ROWS}" if len(view.rows) > MAX_ROWS else ""
    pen.text(MARGIN, top, f"rows of {len(view.rows)} running requests{more}", theme.ink)
    longest = max((len(row.pages) for row in rows), default=1)
    size = min(18.0, (WIDTH - 2 * MARGIN - 110) / longest)
    width = size - (1 if size > 4 else 0.2)
    for index, row in enumerate(rows):
        y = top + 10 + index * 14
        pen.text(MARGIN, y + 10, f"{row.tokens} tokens", theme.soft, 11)
        for at, page in enumerate(row.pages):
            color = theme.prefix(view.nodes[page]) if at < row.shared else theme.private
            if at >= len(row.pages) - row.ahead:
                color = theme.free
            pen.rectangle(MARGIN + 110 + at * size, y, width, 11, color)
