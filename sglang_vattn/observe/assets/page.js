// SPDX-License-Identifier: Apache-2.0
// Polls /vattn/state and shows it. Nothing is sent anywhere.
"use strict";
const POLL_MS = 1000;
const $ = (id) => document.getElementById(id);
const map = new PageMap($("map")), bars = new RowBars($("rows")), graphs = new Graphs($("graphs"));
let view = null, palette = new Palette(), rank = 0, paused = false, failures = 0;
let hover = {}; // one of {page}, {row}, {node}

function unpack(text, type) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new type(bytes.buffer);
}

function decode(state) {
  const prefixes = state.prefixes.map((text) => Array.from(unpack(text, Uint32Array)));
  return {
    ...state,
    states: unpack(state.states, Uint8Array),
    nodes: unpack(state.nodes, Uint32Array),
    sharers: unpack(state.sharers, Uint16Array),
    rows: state.rows.map((row) => ({ ...row, pages: [...prefixes[row.prefix], ...unpack(row.pages, Uint32Array)] })),
  };
}

function count(number, what) {
  return `${number.toLocaleString()} ${what}${number === 1 ? "" : "s"}`;
}

// ---- what is lit
function rows_with(page) {
  return new Set(view.rows.flatMap((row, index) => (row.pages.includes(page) ? [index] : [])));
}

function pages_of_node(node) {
  const pages = new Set();
  view.nodes.forEach((owner, page) => { if (owner === node) pages.add(page); });
  return pages;
}

function lit() {
  if (hover.page > 0) {
    const rows = rows_with(hover.page);
    const pages = new Set([hover.page, ...[...rows].flatMap((index) => view.rows[index].pages)]);
    return { rows, pages, page: hover.page, node: view.nodes[hover.page] };
  }
  if (hover.row !== undefined && view.rows[hover.row]) {
    return { rows: new Set([hover.row]), pages: new Set(view.rows[hover.row].pages), page: -1, node: 0 };
  }
  if (hover.node) {
    const pages = pages_of_node(hover.node);
    const rows = new Set(view.rows.flatMap((row, i) => (row.pages.slice(0, row.shared).some((p) => pages.has(p)) ? [i] : [])));
    return { rows, pages, page: -1, node: hover.node };
  }
  return { rows: null, pages: null, page: -1, node: 0 };
}

// ---- drawing
function draw() {
  if (!view) return;
  const light = lit();
  map.draw(view, palette, light.pages);
  bars.draw(view, palette, light.rows, light.page);
  for (const line of $("tree").children) line.classList.toggle("lit", light.node > 0 && +line.dataset.node === light.node);
}

function draw_all() {
  const facts = view.facts, used = facts.num_pages - facts.free;
  const holders = facts.shared_page_holders / Math.max(1, facts.shared_pages);
  const tiles = [
    [`${used.toLocaleString()} / ${facts.num_pages.toLocaleString()}`, "pages in use"],
    [bytes(facts.physical_bytes), `physical, in ${bytes(facts.virtual_bytes)} of addresses`],
    [`${facts.shared_pages.toLocaleString()} × ${holders.toFixed(1)}`, "shared pages × their mean sharers"],
    [`${facts.rows_ready} of ${facts.requests}`, "running requests with a mapped row"],
    [`${facts.mappings.toLocaleString()}`, `aliases, ${facts.queued_jobs} rows queued`],
    [short(facts.aliased_tokens + facts.copied_tokens), `hit tokens, ${short(facts.copied_tokens)} of them copied`],
    [short(facts.waste_tokens), "tokens of room in last pages"],
  ];
  $("tiles").innerHTML = tiles.map(([value, what]) => `<div class="tile"><b>${value}</b><span>${what}</span></div>`).join("");
  const pages = { free: facts.free, private: facts.private, evictable: facts.evictable, protected: facts.protected };
  $("states").innerHTML = Object.entries(pages)
    .map(([name, n]) => `<span><i style="background:var(--${name})"></i>${name} ${n.toLocaleString()}</span>`)
    .join("") + `<span><i style="background:var(--edge)"></i>padding, guard</span><span>inner square: shared, in the colour of its prefix</span>`;
  $("rows-legend").innerHTML = `<span><i style="background:var(--private)"></i>own</span>`
    + `<span>other colours: shared prefixes</span><span><i style="background:var(--free)"></i>reserved ahead</span>`;
  $("facts").innerHTML = Object.entries(facts)
    .map(([name, value]) => `<div><span>${name}</span><b data-fact="${name}" data-value="${value}">${value.toLocaleString()}</b></div>`)
    .join("");
  draw_tree();
  graphs.draw(view.history, palette);
  draw();
}

function draw_tree() {
  const shown = view.tree, children = new Map();
  for (const node of shown) children.set(node.parent, [...(children.get(node.parent) || []), node]);
  const lines = [];
  const add = (node, depth) => {
    const more = node.below ? `, ${node.below} more below` : "";
    const space = node.namespace ? `, tenant ${node.namespace}` : "";
    lines.push(`<div data-node="${node.id}" style="padding-left:${4 + depth * 14}px"><i style="background:${palette.prefix(node.id)}"></i>`
      + `tokens ${node.start.toLocaleString()}–${node.end.toLocaleString()} <span class="soft">${count(node.pages, "page")}, `
      + `${count(node.hits, "hit")}, ${node.locks} running${space}${more}</span></div>`);
    for (const child of children.get(node.id) || []) add(child, depth + 1);
  };
  for (const node of children.get(0) || []) add(node, 0);
  const facts = view.facts;
  $("tree-size").textContent = `${facts.tree_nodes.toLocaleString()} nodes, ${facts.cached_tokens.toLocaleString()} tokens`
    + (shown.length < facts.tree_nodes && !view.tree_age_s ? `; the ${shown.length} nearest to the root` : "")
    + (view.tree_age_s >= 1 ? `; as of ${Math.round(view.tree_age_s)} s ago` : "");
  const html = lines.join("") || `<div class="soft">empty</div>`;
  if ($("tree").drawn !== html) { $("tree").innerHTML = html; $("tree").drawn = html; }
}

// ---- the pointer
function tip(event, text) {
  $("tip").style.display = text ? "block" : "none";
  $("tip").textContent = text;
  $("tip").style.left = Math.min(event.clientX + 14, window.innerWidth - 350) + "px";
  $("tip").style.top = Math.min(event.clientY + 14, window.innerHeight - 90) + "px";
}

function describe(page) {
  const sharers = rows_with(page).size, node = view.tree.find((each) => each.id === view.nodes[page]);
  let text = `page ${page}: ${STATES[view.states[page]]}`;
  if (view.sharers[page]) text += `\nshared by ${count(view.sharers[page], "running request")}`;
  else if (sharers) text += `\nin the row of ${count(sharers, "running request")}`;
  if (node) text += `\nprefix of tokens ${node.start.toLocaleString()}–${node.end.toLocaleString()}, ${count(node.hits, "hit")}`;
  return text;
}

function point(next, event, text) {
  hover = next;
  tip(event, text);
  draw();
}

$("map").addEventListener("mousemove", (event) => {
  if (!view) return;
  const page = map.at(event, view);
  point(page > 0 ? { page } : {}, event, page >= 0 ? describe(page) : "");
});
$("rows").addEventListener("mousemove", (event) => {
  const found = view && bars.at(event, view);
  if (!found) return point({}, event, "");
  const [index, at] = found, row = view.rows[index];
  if (at >= 0 && at < row.shared) return point({ page: row.pages[at] }, event, describe(row.pages[at]));
  point({ row: index }, event, `row ${row.row || "none"}: ${row.tokens.toLocaleString()} tokens, ${row.pages.length - row.ahead} pages, `
    + `${row.shared} of them shared\n${row.mapped} mapped, ${row.ahead} reserved ahead`);
});
$("tree").addEventListener("mousemove", (event) => {
  const line = event.target.closest("[data-node]");
  if (view) point(line ? { node: +line.dataset.node } : {}, event, "");
});
for (const id of ["map", "rows", "tree"]) $(id).addEventListener("mouseleave", (event) => view && point({}, event, ""));

// ---- polling
async function poll() {
  if (!paused && !document.hidden) {
    try {
      const key = sessionStorage.getItem("vattn-key");
      const answer = await fetch("vattn/state", { headers: key ? { Authorization: "Bearer " + key } : {} });
      if (!answer.ok) throw new Error("the server answers " + answer.status);
      const { ranks, version, time } = await answer.json();
      if (ranks.length > 1 && $("rank").options.length !== ranks.length) {
        $("ranks").hidden = false;
        $("rank").innerHTML = ranks.map((_, index) => `<option>${index}</option>`).join("");
      }
      view = decode(ranks[Math.min(rank, ranks.length - 1)]);
      failures = 0;
      $("status").className = "";
      $("status").textContent = `${version}, ${new Date(time * 1000).toLocaleTimeString()}`;
      draw_all();
      document.documentElement.dataset.shown = +(document.documentElement.dataset.shown || 0) + 1;
    } catch (error) {
      failures += 1;
      $("status").className = "stale";
      $("status").textContent = `no answer (${error.message}); what is below is old`;
    }
  }
  setTimeout(poll, POLL_MS * Math.min(10, 1 + failures));
}

function use_theme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  palette = new Palette();
  if (view) draw_all();
}
$("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  use_theme(now === "dark" ? "light" : "dark");
});
$("pause").addEventListener("click", () => { paused = !paused; $("pause").textContent = paused ? "go on" : "pause"; });
$("rank").addEventListener("change", () => { rank = $("rank").selectedIndex; });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => use_theme(""));
addEventListener("resize", draw);
use_theme(new URLSearchParams(location.search).get("theme") || "");
poll();
