// SPDX-License-Identifier: Apache-2.0
// Small graphs over the last minutes, from the samples that the server keeps.
"use strict";
const SPANS_MIN = [1, 2, 5]; // as many minutes as there are samples for
const GRAPHS = [
  { title: "hit tokens", rate: true, lines: { aliased_tokens: ["aliased", "private"], copied_tokens: ["copied", "second"] } },
  { title: "pages mapped and unmapped", rate: true,
    lines: { pages_mapped: ["mapped", "private"], pages_unmapped: ["unmapped", "second"] } },
  { title: "batches, read by", rate: true,
    lines: { batches_rows: ["rows", "private"], batches_pages: ["pages", "second"], batches_shared: ["shared", "third"] } },
  { title: "pages by state", rate: false,
    lines: { private: ["private", "private"], protected: ["protected", "protected"], evictable: ["evictable", "evictable"] } },
];

function minutes(history) {
  const times = history.time_s, seen = (times[times.length - 1] - times[0]) / 60 || 0;
  return SPANS_MIN.find((span) => seen <= span) || SPANS_MIN[SPANS_MIN.length - 1];
}

// [[seconds before the last sample, value]]; a rate where the facts count up.
function series(history, name, rate) {
  const times = history.time_s, values = history[name], out = [];
  const last = times[times.length - 1];
  for (let i = rate ? 1 : 0; i < times.length; i++) {
    if (last - times[i] > 60 * SPANS_MIN[SPANS_MIN.length - 1]) continue;
    const value = rate ? (values[i] - values[i - 1]) / Math.max(1e-3, times[i] - times[i - 1]) : values[i];
    out.push([last - times[i], value]);
  }
  return out;
}

function short(value) {
  if (value >= 1e6) return (value / 1e6).toFixed(1) + " M";
  if (value >= 1e4) return (value / 1e3).toFixed(0) + " k";
  return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
}

function bytes(value) {
  return value >= 2 ** 30 ? (value / 2 ** 30).toFixed(1) + " GiB" : (value / 2 ** 20).toFixed(1) + " MiB";
}

class Graphs {
  constructor(parent) {
    this.parts = GRAPHS.map((graph) => {
      const box = document.createElement("div"), canvas = document.createElement("canvas");
      const title = document.createElement("div");
      box.append(title, canvas);
      parent.append(box);
      return { graph, title, canvas };
    });
  }

  draw(history, palette) {
    const span = minutes(history);
    for (const { graph, title, canvas } of this.parts) {
      const lines = Object.entries(graph.lines).map(([name, [label, tone]]) => ({
        label, tone: color(tone), points: series(history, name, graph.rate),
      }));
      const top = Math.max(1e-9, ...lines.flatMap((line) => line.points.map((point) => point[1])));
      const legend = lines.map(({ label, tone, points }) => {
        const now = points.length ? short(points[points.length - 1][1]) : "-";
        return `<span><i style="background:${tone}"></i>${label} ${now}</span>`;
      });
      title.innerHTML = `${graph.title}<span class="legend">${legend.join("")}</span>`;
      const height = 84, pen = prepare(canvas, height), width = canvas.clientWidth;
      pen.strokeStyle = color("line");
      pen.lineWidth = 1;
      for (const y of [2.5, height / 2, height - 14.5]) {
        pen.beginPath(); pen.moveTo(0, y); pen.lineTo(width, y); pen.stroke();
      }
      pen.font = "10px system-ui, 'DejaVu Sans', sans-serif";
      pen.fillStyle = palette.soft;
      pen.textAlign = "left";
      pen.fillText(top > 1e-6 ? short(top) : "0", 2, 13);
      pen.fillText(`${span} min ago`, 2, height - 3);
      pen.textAlign = "right";
      pen.fillText("now", width - 2, height - 3);
      for (const { tone, points } of lines) {
        pen.strokeStyle = tone;
        pen.lineWidth = 1.6;
        pen.lineJoin = "round";
        pen.beginPath();
        for (const [ago, value] of points) {
          pen.lineTo(width - (ago / (60 * span)) * width, height - 15 - (value / top) * (height - 18));
        }
        pen.stroke();
      }
    }
  }
}
