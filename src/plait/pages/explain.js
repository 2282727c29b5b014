// `plait explain --html`: what every class of ranks holds and sends, and who holds which part of which tensor.
PAGES.explain = (values, main) => {
  const axesUsed = Object.entries(values.grid).filter(([, degree]) => degree > 1).map(([axis, degree]) => `${axis} ${degree}`);
  main.append(table(["", ""], [["ranks", [values.ranks, format.number]], ["grid", axesUsed.join(" x ") || "one rank"],
    ["parameters", [values.parameters, format.number]], ["micro-batch", values.micro_batch.join(" x ")],
    ["transport", values.transport], ["pipeline stages", [values.stages, String]], ["bubble", [values.bubble, format.percent]]]));
  memory(values, main);
  messages(values, main);
  layout(values, main);
};

function ranksText(ranks) { // 0-3, 8-11
  const runs = [];
  for (const rank of ranks) {
    if (runs.length && runs.at(-1)[1] === rank - 1) runs.at(-1)[1] = rank;
    else runs.push([rank, rank]);
  }
  const texts = runs.slice(0, 3).map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`));
  return texts.join(", ") + (runs.length > 3 ? `, ... (${ranks.length})` : "");
}

function memory(values, main) {
  const parts = (use) => Object.fromEntries(Object.entries(use).filter(([name, size]) => size && !["host", "disk"].includes(name)));
  const rows = values.alike.map((row) => ({ name: `ranks ${ranksText(row.ranks)}`, parts: parts(row.memory) }));
  for (const row of values.measured ? values.measured.alike : []) {
    rows.push({ name: `measured, ${ranksText(row.ranks)}`, parts: parts(row.memory) });
  }
  stacks(main, "memory per rank", { formatter: format.bytes, rows, note: "ranks with the same memory and traffic share a bar" });
}

function messages(values, main) {
  main.append(el("h2", {}, "communication per step"));
  const shown = el("div");
  const show = (index) => {
    const { traffic } = values.alike[index];
    shown.replaceChildren(table(["for", "operation", "over", "calls", "bytes", "sent"], traffic.map((row) =>
      [row.of, row.verb, row.axes.join(" x ") || "all ranks", [row.calls, format.number], [row.bytes, format.bytes],
        [row.leaves, format.bytes]])));
    const rows = {};
    for (const row of traffic) {
      const axis = row.axes.join(" x ") || "all ranks";
      (rows[axis] ||= { name: axis, parts: {} }).parts[row.of] = (rows[axis].parts[row.of] || 0) + row.leaves;
    }
    if (traffic.length) stacks(shown, "bytes sent by a rank, by axis", { formatter: format.bytes, rows: Object.values(rows) });
  };
  const select = el("select", { id: "class-of-ranks", onchange: () => show(select.selectedIndex) },
    values.alike.map((row) => el("option", {}, `ranks ${ranksText(row.ranks)}`)));
  main.append(el("div", { class: "controls" }, el("label", { for: select.id }, "of each of ", select)), shown);
  show(0);
}

// --- who holds which part of which tensor

function layout(values, main) {
  main.append(el("h2", {}, "layout"));
  const shown = el("div");
  const show = (index) => {
    select.selectedIndex = index;
    shown.replaceChildren();
    unit(values, values.units[index], shown);
  };
  const named = ({ names }) => names[0] + (names.length > 1 ? ` and ${names.length - 1} like it` : "");
  const select = el("select", { id: "unit", onchange: () => show(select.selectedIndex) },
    values.units.map((each) => el("option", {}, named(each))));
  main.append(el("div", { class: "controls" }, el("label", { for: select.id }, "unit ", select)), shown);
  if (values.units.length) show(Math.min(1, values.units.length - 1));
}

function unit(values, each, parent) {
  const size = (shape) => [shape.length ? shape[0] : 1, shape.slice(1).reduce((product, dim) => product * dim, 1)];
  const holders = each.tensors.length ? each.tensors[0].held.length : 0;
  const isDivided = each.tensors.some((tensor) => tensor.held.some((held) => held.ep)); // experts
  const label = ({ ep, row, col }) => (values.grid.row > 1 ? `row ${row}, col ${col}` : isDivided ? `ep ${ep}` : `col ${col}`);
  const names = holders > 1 ? each.tensors[0].held.map(label) : ["every rank of the stage"];
  picture(parent, "tensors, and the parts that the ranks of a tp grid compute with", (node, width, note) => {
    const high = Math.max(...each.tensors.map(({ shape }) => size(shape)[0]));
    const scale = (length) => Math.max(14, 90 * Math.sqrt(length / high));
    let [x, y, tallest] = [0, 0, 0];
    for (const tensor of each.tensors) {
      const [rows, columns] = size(tensor.shape);
      const short = tensor.name.split(".").slice(-2).join(".");
      const [wide, tall] = [Math.max(scale(columns), 14), scale(rows)];
      const cell = Math.max(wide, short.length * POINTS_PER_CHARACTER, 70) + 16;
      if (x && x + cell > width) { [x, y, tallest] = [0, y + tallest + 12, 0]; }
      node.append(svg("text", { x, y: y + 12 }, short),
        svg("text", { class: "muted", x, y: y + 26 }, tensor.shape.join(" x ") || "scalar"));
      tensor.held.forEach((held, at) => {
        const [down, across] = [held.ranges[0] || [[0, 1]], held.ranges[1] || [[0, columns]]]; // as a matrix
        const same = tensor.held.filter((other) => JSON.stringify(other.ranges) === JSON.stringify(held.ranges));
        for (const [top, bottom] of down) for (const [left, right] of across) {
          const share = (wide * (right - left)) / columns / same.length; // copies share the width of their box
          const box = { x: x + (wide * left) / columns + share * same.indexOf(held), y: y + 32 + (top / rows) * tall,
            width: Math.max(1, share - 1), height: Math.max(1, ((bottom - top) / rows) * tall - 1) };
          node.append(svg("rect", { ...box, fill: COLORS[at % COLORS.length] }));
          const ranges = held.ranges.map((dim) => dim.map(([from, to]) => `${from}:${to}`).join(" and ")).join(", ");
          note(box.x + box.width / 2, box.y + box.height / 2, `${tensor.name}[${ranges}]: ` +
            (same.length > 1 ? `${same.map(label).join("; ")}: a copy each` : label(held)));
        }
      });
      x += cell;
      tallest = Math.max(tallest, tall + 34);
    }
    return [y + tallest + 4, legend(names, COLORS)];
  }, { note: `on pipeline stage ${[...new Set(each.stages)].join(", ")}; areas are not to scale`,
    values: () => table(["tensor", "shape", "held by", "ranges"], each.tensors.flatMap((tensor) => tensor.held.map((held) =>
      [tensor.name, tensor.shape.join(" x "), label(held), JSON.stringify(held.ranges)]))) });
  storage(each, parent);
}

function storage(each, parent) {
  const zeroed = each.shards > 1;
  const title = `flat storage of ${format.number(each.numel)} elements, ranges: ${each.shards}`;
  picture(parent, title, (node, width, note) => {
    const scale = (at) => (at / each.numel) * width;
    each.tensors.forEach((tensor, at) => {
      const x = scale(tensor.start), wide = scale(tensor.numel);
      node.append(svg("rect", { x, y: 20, width: Math.max(1, wide - 1), height: 24, fill: COLORS[at % COLORS.length] }));
      const from = Math.floor((tensor.start * each.shards) / each.numel);
      const to = Math.floor(((tensor.start + Math.max(0, tensor.numel - 1)) * each.shards) / each.numel);
      note(x + wide / 2, 32, `${tensor.name}: elements ${tensor.start} to ${tensor.start + tensor.numel}` +
        (zeroed ? `, owned by shard ${from === to ? from : `${from} to ${to}`}` : ""));
    });
    const every = Math.ceil(each.shards / (width / 70));
    for (let shard = 0; shard < each.shards && zeroed; shard += every) {
      node.append(svg("path", { class: "edge", d: `M${scale((shard * each.numel) / each.shards) + 0.5} 4v44` }),
        svg("text", { class: "muted", x: scale((shard * each.numel) / each.shards) + 4, y: 14 }, `shard ${shard}`));
    }
    return [50];
  }, { note: zeroed ? "the rank at each coordinate on shard owns one range, across the borders of tensors"
    : "owned by every rank" });
}
