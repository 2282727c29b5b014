"use strict";
// The drawings of all pages. Every drawing is redrawn for its width, follows the scheme of colours, can be read
// with the keyboard (arrow keys move, the line below it says what is there), and has its numbers in a table.

const COLORS = ["#3d6fd6", "#e07b39", "#1e9e83", "#b84d97", "#8fae2f", "#8e6bd1", "#c29a1c", "#4fa3c4", "#a0644a"];
const POINTS_PER_CHARACTER = 6.8; // of the labels' font
const PAGES = {}; // what draws the values of a kind of page

// --- elements and numbers

function make(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes = {}, ...children) => make(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  make(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function digits(value, number = 3) { // as Python's "g"
  return value === 0 ? "0" : String(Number(value.toPrecision(number)));
}
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const format = {
  number: (value) => (!isNumber(value) ? "-" : Math.abs(value) >= 1e4 && Math.abs(value) < 1e21 ? Math.round(value).toLocaleString("en-US")
    : digits(value, 4)),
  seconds: (value) => (!isNumber(value) ? "-" : value < 0 ? `-${format.seconds(-value)}` : value >= 1000
    ? `${Math.round(value).toLocaleString("en-US")} s` : value >= 1 || value === 0 ? `${digits(value)} s`
      : value >= 1e-3 ? `${digits(1e3 * value)} ms` : `${digits(1e6 * value)} us`),
  bytes: (value) => {
    if (!isNumber(value)) return "unknown";
    for (const [unit, power] of [["TiB", 40], ["GiB", 30], ["MiB", 20], ["KiB", 10]]) {
      if (Math.abs(value) >= 2 ** power) return `${(value / 2 ** power).toFixed(1)} ${unit}`;
    }
    return `${Math.round(value)} B`;
  },
  percent: (value) => (isNumber(value) ? `${(100 * value).toFixed(1)}%` : "-"),
};

// --- tables and figures

/** A table. A cell is a text, or [value, formatter] with the value as it is in the JSON in `data-value`. */
function table(headings, rows, attributes = () => ({})) {
  const isText = (each) => each instanceof Node || (typeof each === "string" && each.length > 24);
  const cell = (each) => (Array.isArray(each) ? el("td", { "data-value": JSON.stringify(each[0]) }, each[1](each[0]))
    : el("td", { class: isText(each) ? "text" : null }, each));
  return el("div", { class: "scroll", tabindex: 0 }, el("table", {},
    el("thead", {}, el("tr", {}, headings.map((heading, at) =>
      el("th", { scope: "col", class: rows.length && isText(rows[0][at]) ? "text" : null }, heading)))),
    el("tbody", {}, rows.map((row, at) => el("tr", attributes(row, at), row.map(cell))))));
}

const legend = (names, colors) => el("ul", { class: "legend" }, names.map((name, at) =>
  el("li", {}, el("i", { style: `background:${colors[at]}` }), name)));

/** Add a figure. `draw(width, say)` returns its nodes; `say` writes the line below it. Returns a redraw. */
function figure(parent, title, draw, { values = null, note = "" } = {}) {
  const drawing = el("div", { class: "drawing" });
  const readout = el("output", { class: "readout", "aria-live": "polite" }, note);
  const box = el("figure", { "aria-label": title }, el("figcaption", {}, title), drawing, readout);
  if (values) {
    const details = el("details", {}, el("summary", {}, "values"));
    details.addEventListener("toggle", () => details.childElementCount > 1 || details.append(values()));
    box.append(details);
  }
  parent.append(box);
  let width = 0;
  const redraw = () => {
    width = drawing.clientWidth;
    if (width) drawing.replaceChildren(...[draw(width, (text) => { readout.textContent = text || note; })].flat());
  };
  redraw();
  matchMedia("print").addEventListener("change", redraw); // for the width of the paper, and back
  new ResizeObserver(() => requestAnimationFrame(() => drawing.clientWidth !== width && redraw())).observe(drawing);
  return redraw;
}

// --- axes

/** Powers of a logarithmic axis's base between its ends, or round steps. */
function ticks({ low, high, log }, number) {
  if (log) {
    const [first, last] = [Math.ceil(Math.log(low) / Math.log(log) - 1e-9), Math.floor(Math.log(high) / Math.log(log) + 1e-9)];
    const every = Math.max(1, Math.ceil((last - first + 1) / Math.max(1, number)));
    const powers = [];
    for (let power = first; power <= last; power += every) powers.push(log ** power);
    if (powers.length > 1) return powers;
  }
  const span = high - low || Math.abs(high) || 1;
  const raw = span / Math.max(1, number), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((each) => each * power >= raw * 0.999) * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-6; at++) found.push(at * step);
  return found;
}

/** A frame with labelled axes: {node, x(value), y(value), left, right, top, bottom}. */
function axes(width, height, { x, y, label }) {
  const margin = { top: 10, right: 14, bottom: 40, left: 0 };
  const yTicks = ticks(y, height / 45);
  const longest = Math.max(0, ...yTicks.map((tick) => y.format(tick).length));
  margin.left = 26 + longest * POINTS_PER_CHARACTER;
  const [left, right, top, bottom] = [margin.left, width - margin.right, margin.top, height - margin.bottom];
  const share = ({ low, high, log }, value) => (log ? Math.log(value / low) / (Math.log(high / low) || 1)
    : (value - low) / (high - low || 1));
  const atX = (value) => left + share(x, value) * (right - left);
  const atY = (value) => bottom - share(y, value) * (bottom - top);
  const node = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img",
    "aria-label": label });
  for (const tick of yTicks) {
    node.append(svg("path", { class: "grid", d: `M${left} ${atY(tick)}H${right}` }),
      svg("text", { class: "muted", x: left - 5, y: atY(tick) + 4, "text-anchor": "end" }, y.format(tick)));
  }
  const wide = POINTS_PER_CHARACTER * Math.max(...ticks(x, 4).map((tick) => x.format(tick).length)) + 24;
  for (const tick of ticks(x, (right - left) / wide)) {
    const half = (x.format(tick).length * POINTS_PER_CHARACTER) / 2;
    const at = Math.min(atX(tick), width - half - 3);
    node.append(svg("path", { class: "grid", d: `M${atX(tick)} ${bottom}v5` }),
      svg("text", { class: "muted", x: at, y: bottom + 17, "text-anchor": "middle" }, x.format(tick)));
  }
  node.append(svg("text", { class: "muted", x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, x.name),
    svg("text", { class: "muted", "text-anchor": "middle", transform: `translate(11 ${(top + bottom) / 2}) rotate(-90)` },
      y.name), svg("path", { class: "grid", d: `M${left} ${top}V${bottom}H${right}` }));
  return { node, x: atX, y: atY, left, right, top, bottom };
}

function extent(values, { zero = false, pad = 0.04, log = 0 } = {}) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (isNumber(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return { low: 0, high: 1 };
  if (log) return { low: low / (high / low) ** pad, high: high * (high / low) ** pad };
  if (zero) low = Math.min(low, 0);
  const room = (high - low || Math.abs(high) || 1) * pad;
  return { low: zero && low === 0 ? 0 : low - room, high: high + room };
}

/** Call `choose(index)` for the mark nearest to the pointer, and for arrow keys; `act(index)` for a click. */
function pick(node, marks, choose, act = () => {}) {
  let chosen = -1;
  const go = (index) => { chosen = Math.max(0, Math.min(marks.length - 1, index)); choose(chosen); };
  const nearest = (event) => {
    const box = node.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = 0, least = Infinity;
    marks.forEach(([markX, markY], index) => {
      const far = (markX - x) ** 2 + (markY === null ? 0 : (markY - y) ** 2);
      if (far < least) [best, least] = [index, far];
    });
    return best;
  };
  if (!marks.length) return;
  node.addEventListener("pointermove", (event) => go(nearest(event)));
  node.addEventListener("click", (event) => { go(nearest(event)); act(chosen); });
  node.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (step) { go(chosen + step); event.preventDefault(); }
    if (event.key === "Enter" && chosen >= 0) act(chosen);
  });
}

// --- charts

/** Curves: series of {name, points, color, dashed, dots, bare}; a point is [x, y], or [x, y, low, high] with an interval.
 * `bare`: dots without a line. `marks`: x of vertical lines, with a text. `log` of an axis: the base of its logarithm;
 * `read` of x: a value as the line below and the table show it. */
function lines(parent, title, { series, x, y, height = 230, marks = [], zero = false }) {
  const shown = series.filter((each) => each.points.some((point) => isNumber(point[1])));
  if (!shown.length) return;
  const colors = shown.map((each, at) => each.color || COLORS[at % COLORS.length]);
  const all = shown.flatMap((each) => each.points);
  const xs = [...new Set(all.map((point) => point[0]))].sort((a, b) => a - b);
  const read = x.read || x.format;
  figure(parent, title, (width, say) => {
    const frame = axes(width, height, { label: title,
      x: { ...extent(xs, { pad: 0, log: x.log }), ...x },
      y: { ...extent(all.flatMap((point) => point.slice(1)), { zero, log: y.log }), ...y } });
    for (const { at, text } of marks) {
      frame.node.append(svg("path", { class: "cursor", d: `M${frame.x(at)} ${frame.top}V${frame.bottom}` },
        svg("title", {}, text)));
    }
    shown.forEach((each, at) => {
      let path = "", pen = "M";
      for (const [px, py, low, high] of each.points) {
        if (!isNumber(py)) { pen = "M"; continue; }
        path += `${pen}${frame.x(px).toFixed(1)} ${frame.y(py).toFixed(1)}`;
        pen = each.bare ? "M" : "L";
        if (isNumber(low)) {
          frame.node.append(svg("path", { d: `M${frame.x(px)} ${frame.y(low)}V${frame.y(high)}`, stroke: colors[at],
            "stroke-width": 5, opacity: 0.35 }));
        }
        if (each.dots || each.bare || each.points.length === 1) {
          frame.node.append(svg("circle", { cx: frame.x(px), cy: frame.y(py), r: 3, fill: colors[at] }));
        }
      }
      frame.node.append(svg("path", { d: path, fill: "none", stroke: colors[at], "stroke-width": 1.6,
        "stroke-dasharray": each.dashed ? "5 4" : null }));
    });
    const cursor = svg("path", { class: "cursor" });
    frame.node.append(cursor);
    const lookup = shown.map((each) => new Map(each.points));
    pick(frame.node, xs.map((value) => [frame.x(value), null]), (index) => {
      cursor.setAttribute("d", `M${frame.x(xs[index])} ${frame.top}V${frame.bottom}`);
      const values = shown.filter((_, at) => lookup[at].has(xs[index]))
        .map((each) => `${each.name} ${y.format(new Map(each.points).get(xs[index]))}`);
      const noted = marks.filter((mark) => mark.at === xs[index]).map((mark) => mark.text);
      say(`${x.name} ${read(xs[index])}: ${[...values, ...noted].join(", ")}`);
    });
    const named = shown.map((each, at) => [each, colors[at]]).filter(([each]) => !each.unlisted);
    return [shown.length > 1 ? legend(named.map(([each]) => each.name), named.map(([, color]) => color)) : null, frame.node]
      .filter(Boolean);
  }, { values: () => table([x.name, ...shown.map((each) => each.name)], xs.map((value) => [[value, read],
    ...shown.map((each) => [new Map(each.points).get(value) ?? null, y.format])])) });
}

/** A figure of shapes: `draw(node, width, note)` fills the SVG and returns its height and what is above it; `note(x,
 * y, text)` has a place read as a text. */
function picture(parent, title, draw, options) {
  return figure(parent, title, (width, say) => {
    const marks = [], texts = [];
    const node = svg("svg", { width, tabindex: 0, role: "img", "aria-label": title });
    const [height, ...above] = draw(node, width, (x, y, text) => { marks.push([x, y]); texts.push(text); });
    node.setAttribute("height", height);
    pick(node, marks, (index) => say(texts[index]));
    return [...above, node];
  }, options);
}

/** Horizontal bars of stacked parts: rows of {name, parts: {part: value}}. */
function stacks(parent, title, { rows, formatter, limit = null, note: below = "" }) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.parts).filter((name) => row.parts[name])))];
  const colors = names.map((_, at) => COLORS[at % COLORS.length]);
  const totals = rows.map((row) => names.reduce((sum, name) => sum + (row.parts[name] || 0), 0));
  return picture(parent, title, (node, width, note) => {
    const label = 10 + POINTS_PER_CHARACTER * Math.max(...rows.map((row) => row.name.length));
    const end = 14 + POINTS_PER_CHARACTER * Math.max(...totals.map((total) => formatter(total).length));
    const high = Math.max(...totals, limit || 0) || 1, height = rows.length * 26 + 6;
    const scale = (value) => (value / high) * Math.max(40, width - label - end);
    rows.forEach((row, at) => {
      const top = at * 26 + 4;
      node.append(svg("text", { x: 0, y: top + 14 }, row.name));
      let from = 0;
      names.forEach((name, index) => {
        const value = row.parts[name] || 0;
        if (!value) return;
        const [x, wide] = [label + scale(from), scale(value)];
        node.append(svg("rect", { x, y: top, width: wide, height: 20, fill: colors[index] },
          svg("title", {}, `${name}: ${formatter(value)}`)));
        note(x + wide / 2, top + 10, `${row.name}: ${name} ${formatter(value)} of ${formatter(totals[at])}`);
        from += value;
      });
      node.append(svg("text", { x: label + scale(from) + 6, y: top + 14 }, formatter(totals[at])));
    });
    if (limit) {
      const at = label + scale(limit);
      node.append(svg("path", { class: "cursor", d: `M${at} 0V${height}` }, svg("title", {}, formatter(limit))));
    }
    return [height, legend(names, colors)];
  }, { note: below, values: () => table(["", ...names, "total"], rows.map((row, at) => [row.name,
    ...names.map((name) => [row.parts[name] || 0, formatter]), [totals[at], formatter]])) });
}

function start() {
  const values = JSON.parse(document.getElementById("values").textContent);
  const main = document.querySelector("main");
  PAGES[document.body.dataset.kind](values, main);
  document.body.dataset.drawn = Math.round(performance.now()); // ms since the browser began to load the page
}
