# SPDX-License-Identifier: Apache-2.0
"""The colours of ``top`` and ``snapshot``; the page has the same ones in its style sheet."""

from __future__ import annotations

import colorsys
from typing import NamedTuple


class Theme(NamedTuple):
    paper: str
    ink: str
    soft: str
    edge: str
    free: str
    private: str
    evictable: str
    protected: str
    prefix_lightness: float

    def state(self, index: int) -> str:
        """The colour of ``page_states.STATES[index]``."""
        return (self.free, self.private, self.evictable, self.protected, self.edge, self.edge)[index]

    def prefix(self, node: int) -> str:
        """The colour of a tree node: any hue but the blues, which mean a request's own pages."""
        hue = (250 + node * 0.6180339887 % 1 * 300) % 360 / 360
        red, green, blue = colorsys.hls_to_rgb(hue, self.prefix_lightness, 0.68)
        return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


LIGHT = Theme("#fcfcfb", "#1b1b19", "#65645e", "#8a8983", "#e2e1db", "#2a78d6", "#1a9e6f", "#c98500", 0.42)
DARK = Theme("#181817", "#f1f0ea", "#a3a29a", "#75746d", "#2f2e2b", "#4a92ea", "#24a877", "#d99a1c", 0.64)
