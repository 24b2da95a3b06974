// SPDX-License-Identifier: Apache-2.0
// The map of all pages and the bars of the rows, on two canvases.
"use strict";
const STATES = ["free", "private", "evictable", "protected", "padding", "guard"];

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// Any hue but the blues, which mean a request's own pages.
function prefix_color(node) {
  return `hsl(${(250 + ((node * 0.6180339887) % 1) * 300) % 360} 68% ${color("prefix-light")})`;
}

// Cached: a style lookup a page would cost more than the drawing.
class Palette {
  constructor() {
    this.states = STATES.map((state) => color(state === "padding" || state === "guard" ? "edge" : state));
    this.paper = color("paper");
    this.ink = color("ink");
    this.soft = color("soft");
    this.prefixes = new Map();
  }
  prefix(node) {
    if (!this.prefixes.has(node)) this.prefixes.set(node, prefix_color(node));
    return this.prefixes.get(node);
  }
}

// A canvas of this height in CSS pixels, sharp on any screen.
function prepare(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = height + "px";
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

class PageMap {
  constructor(canvas) { this.canvas = canvas; this.columns = this.size = 1; }

  // `lit`: pages to light up, null for none. A shared page wears the colour of its prefix inside that of its state.
  draw(view, palette, lit) {
    const count = view.states.length, width = this.canvas.clientWidth;
    this.size = Math.max(3, Math.min(26, Math.floor(Math.sqrt((width * 400) / count))));
    this.columns = Math.max(1, Math.floor(width / this.size));
    const pen = prepare(this.canvas, Math.ceil(count / this.columns) * this.size);
    const gap = this.size > 5 ? 1 : 0.5, cell = this.size - gap;
    for (let page = 0; page < count; page++) {
      const x = (page % this.columns) * this.size, y = Math.floor(page / this.columns) * this.size;
      pen.globalAlpha = lit && !lit.has(page) ? 0.22 : 1;
      pen.fillStyle = palette.states[view.states[page]];
      pen.fillRect(x, y, cell, cell);
      if (view.sharers[page]) {
        const inset = Math.max(1, cell / 4);
        pen.fillStyle = palette.paper;
        pen.fillRect(x + inset - 0.5, y + inset - 0.5, cell - 2 * inset + 1, cell - 2 * inset + 1);
        pen.fillStyle = palette.prefix(view.nodes[page]);
        pen.fillRect(x + inset, y + inset, cell - 2 * inset, cell - 2 * inset);
      }
    }
    pen.globalAlpha = 1;
  }

  // The page below the pointer, -1 for none.
  at(event, view) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const page = Math.floor((event.clientY - box.top) / this.size) * this.columns + column;
    return column < this.columns && page >= 0 && page < view.states.length ? page : -1;
  }
}

class RowBars {
  constructor(canvas) { this.canvas = canvas; this.line = 16; this.label = 112; this.size = 1; }

  // `lit`: indices of rows to light up, null for none; `page`: the page to outline in them.
  draw(view, palette, lit, page) {
    const rows = view.rows, longest = Math.max(1, ...rows.map((row) => row.pages.length));
    this.line = rows.length > 60 ? 9 : 16;
    this.size = Math.min(18, (this.canvas.clientWidth - this.label) / longest);
    const pen = prepare(this.canvas, Math.max(1, rows.length) * this.line + 2);
    pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    if (!rows.length) {
      pen.fillStyle = palette.soft;
      pen.fillText("no request is running", 0, this.line / 2 + 1);
    }
    rows.forEach((row, index) => {
      const y = index * this.line + 1, height = this.line - 3;
      pen.globalAlpha = lit && !lit.has(index) ? 0.22 : 1;
      if (this.line > 10) {
        pen.fillStyle = palette.soft;
        const how = row.ready ? "" : row.row ? " (mapping)" : " (no row)";
        pen.fillText(`${row.tokens.toLocaleString()} tokens${how}`, 0, y + height / 2);
      }
      const first_ahead = row.pages.length - row.ahead;
      row.pages.forEach((number, at) => {
        const x = this.label + at * this.size, width = Math.max(0.6, this.size - (this.size > 4 ? 1 : 0.2));
        const tone = at < row.shared ? palette.prefix(view.nodes[number]) : palette.states[at < first_ahead ? 1 : 0];
        pen.fillStyle = tone;
        if (at < row.mapped || !row.row) pen.fillRect(x, y, width, height);
        else pen.fillRect(x, y + height - 3, width, 3); // asked for, not mapped yet
        if (number === page && (!lit || lit.has(index))) {
          pen.strokeStyle = palette.ink;
          pen.lineWidth = 2;
          pen.strokeRect(x, y, Math.max(2, width), height);
        }
      });
    });
    pen.globalAlpha = 1;
  }

  // [index of the row, index of the page in it or -1] below the pointer; null for none.
  at(event, view) {
    const box = this.canvas.getBoundingClientRect();
    const index = Math.floor((event.clientY - box.top - 1) / this.line);
    if (index < 0 || index >= view.rows.length) return null;
    const at = Math.floor((event.clientX - box.left - this.label) / this.size);
    return [index, at >= 0 && at < view.rows[index].pages.length ? at : -1];
  }
}
