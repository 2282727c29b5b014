// `plait plan --html`: the priced plans by time and memory, and one step of the chosen one.
const STRANDS = { "data only": 0, tensor: 1, pipeline: 2, "tensor and pipeline": 3 };
const KEYS = ["pp", "tp", "zero"];

function strandOf({ degrees }) {
  const [tensor, pipeline] = [degrees.tp !== "1" && degrees.tp !== "1x1", degrees.pp > 1];
  return tensor && pipeline ? "tensor and pipeline" : tensor ? "tensor" : pipeline ? "pipeline" : "data only";
}

PAGES.plan = (values, main) => {
  const plans = values.choices;
  const letter = (at) => String.fromCharCode(65 + (at % 26)) + (at < 26 ? "" : Math.floor(at / 26)); // A, ..., Z, A1
  const names = new Map(plans.filter((plan) => plan.front).map((plan, at) => [plan, letter(at)]));
  const state = { plan: plans[0], pinned: [] };
  const [chooser, chosen] = [el("section"), el("section", { "aria-live": "polite" })];
  const redraws = [];
  const choose = (plan) => { state.plan = plan; show(); };
  const show = () => {
    redraws.forEach((redraw) => redraw());
    chosen.replaceChildren();
    details(values, state, chosen, () => show());
  };
  main.append(el("p", {}, values.machine.name), chooser, chosen);
  if (plans.length > 2) frontier(values, state, chooser, names, choose, redraws);
  controls(values, state, chooser, choose, redraws);
  show();
};

// --- the plans

function frontier(values, state, parent, names, choose, redraws) {
  const plans = values.choices;
  const used = Object.keys(STRANDS).filter((strand) => plans.some((plan) => strandOf(plan) === strand));
  redraws.push(figure(parent, "time of a step against memory of the fullest rank", (width, say) => {
    const limit = values.capacity_bytes / 2 ** 30;
    const memory = (plan) => plan.memory_high_bytes / 2 ** 30;
    const fastest = Math.min(...plans.map((plan) => plan.step_s));
    const shown = plans.filter((plan) => plan.step_s <= 2 * fastest || plan.front);
    const frame = axes(width, Math.min(420, Math.max(260, width * 0.5)), {
      label: "Plans by time and memory; arrow keys move, Enter chooses",
      x: { ...extent([...shown.map(memory), limit]), name: "memory, GiB", format: format.number },
      y: { ...extent(shown.map((plan) => plan.step_s)), name: "step", format: format.seconds } });
    const on = shown.filter((plan) => plan.front);
    let path = "";
    on.forEach((plan, at) => { path += `${at ? `V${frame.y(plan.step_s)}H` : "M"}${frame.x(memory(plan))}` +
      (at ? "" : ` ${frame.y(plan.step_s)}`); });
    frame.node.append(svg("path", { class: "edge", "stroke-opacity": 0.35, d: path }),
      svg("path", { class: "cursor", d: `M${frame.x(limit)} ${frame.top}V${frame.bottom}` },
        svg("title", {}, `memory of a device: ${format.bytes(values.capacity_bytes)}`)));
    const marks = [], labels = [];
    for (const plan of shown) {
      const [x, y] = [frame.x(memory(plan)), frame.y(plan.step_s)];
      const mark = svg("circle", { class: plan === state.plan ? "mark chosen" : "mark", cx: x, cy: y,
        r: plan.front ? 6 : 4, fill: COLORS[STRANDS[strandOf(plan)]], "fill-opacity": plan.front ? 1 : 0.65 });
      frame.node.append(mark);
      marks.push([x, y]);
      if (plan.front && labels.every(([otherX, otherY]) => Math.abs(otherX - x) > 12 || Math.abs(otherY - y) > 15)) {
        frame.node.append(svg("text", { x: x - 4, y: Math.max(12, y - 10) }, names.get(plan)));
        labels.push([x, y]);
      }
    }
    pick(frame.node, marks, (index) => say(`${names.get(shown[index]) || ""} ${format.seconds(shown[index].step_s)}, ` +
      `${format.bytes(shown[index].memory_high_bytes)}: ${shown[index].plan}`), (index) => choose(shown[index]));
    return [legend(used, used.map((strand) => COLORS[STRANDS[strand]])), frame.node];
  }, { note: "A, B, ...: no other plan here is as fast with as little memory. Choose one with a click or Enter." }));
  const list = el("details", { open: true }, el("summary", {}, "plans on the front"));
  const on = plans.filter((plan) => plan.front);
  parent.append(list);
  redraws.push(() => {
    const rows = on.map((plan) => [el("button", { onclick: () => choose(plan) }, names.get(plan)),
      [plan.step_s, format.seconds], [plan.memory_high_bytes, format.bytes], [plan.mfu_causal, format.percent],
      [plan.exposed_s, format.seconds], [plan.bubble, format.percent], el("code", {}, plan.plan)]);
    const attributes = (_, at) => ({ class: on[at] === state.plan ? "chosen" : null, "data-plan": on[at].plan });
    list.replaceChildren(list.firstChild,
      table(["", "step", "memory", "MFU", "exposed", "bubble", "plan"], rows, attributes));
  });
}

/** One control per degree: it moves to the fastest priced plan with that value, and with the others if there is. */
function controls(values, state, parent, choose, redraws) {
  if (values.choices.length < 3) return;
  const box = el("div", { class: "controls", role: "group", "aria-label": "what if" }, "what if: ");
  const selects = KEYS.map((key) => {
    const options = [...new Set(values.choices.map((plan) => String(plan.degrees[key])))]
      .sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const select = el("select", { id: `what-if-${key}`, onchange: () => {
      const wanted = { ...state.plan.degrees, [key]: select.value };
      const same = (plan) => KEYS.filter((other) => String(plan.degrees[other]) === String(wanted[other])).length;
      const possible = values.choices.filter((plan) => String(plan.degrees[key]) === select.value);
      choose(possible.reduce((best, plan) => (same(plan) > same(best) ? plan : best)));
    } }, options.map((value) => el("option", { value }, value)));
    box.append(el("label", { for: select.id }, `${key} = `, select));
    return select;
  });
  parent.append(box);
  redraws.push(() => selects.forEach((select, at) => { select.value = String(state.plan.degrees[KEYS[at]]); }));
}

// --- the chosen plan

function details(values, state, parent, show) {
  const { plan, pinned } = state;
  const detail = plan.detail;
  const isPinned = pinned.includes(plan);
  parent.append(el("h2", {}, "chosen plan"), el("p", { id: "chosen" }, el("code", {}, plan.plan)),
    el("div", { class: "controls" }, el("button", { onclick: () => {
      state.pinned = isPinned ? pinned.filter((other) => other !== plan) : [...pinned, plan].slice(-3);
      show();
    } }, isPinned ? "unpin" : "pin to compare")));
  const compared = [plan, ...(values.choices.length === 2 ? values.choices : pinned).filter((other) => other !== plan)];
  parent.append(facts(compared));
  const columns = el("div", { class: "columns" });
  parent.append(columns);
  stacks(columns, "time of a step by part", { formatter: format.seconds,
    rows: compared.map((each, at) => ({ name: at ? `pinned ${at}` : "chosen", parts: each.parts_s })),
    note: `hidden by computation: ${Object.entries(plan.hidden_s).map(([part, seconds]) =>
      `${part} ${format.seconds(seconds)}`).join(", ") || "nothing"}` });
  if (!detail) return;
  overStep(values, detail, columns);
  if (detail.timeline) {
    const one = detail.timeline, ranks = detail.ranks_per_stage;
    const rows = one.rows.map((row, at) => ({ ...row, name: ranks > 1 ? `stage rank ${at} (x ${ranks})` : row.name }));
    parent.append(el("h2", {}, "one step"));
    timelines(parent, [{ ...one, title: "actions of the pipeline's ranks", rows }]);
  } else {
    parent.append(el("p", {}, "No timeline: too many actions for a page. plait schedule draws the pipeline alone."));
  }
  network(values, plan, parent);
}

function facts(compared) {
  const rows = [["step", "step_s", format.seconds], ["interval", "interval_s", (pair) => pair.map(format.seconds).join(" to ")],
    ["tokens/s per device", "tokens_per_s_per_device", format.number], ["MFU, causal attention", "mfu_causal", format.percent],
    ["MFU, full attention", "mfu_full", format.percent], ["memory, upper end", "memory_high_bytes", format.bytes],
    ["memory", "memory_bytes", format.bytes], ["exposed communication", "exposed_s", format.seconds],
    ["bubble", "bubble", format.percent], ["days", "days", format.number], ["device-hours", "device_hours", format.number],
    ["dollars", "dollars", format.number], ["energy, MWh", "joules", (joules) => format.number(joules / 3.6e9)]]
    .filter(([, key]) => compared[0][key] !== null);
  const headings = ["", "chosen", ...compared.slice(1).map((_, at) => `pinned ${at + 1}`)];
  const plans = compared.length > 1 ? [["plan", ...compared.map((plan) => el("code", {}, plan.plan))]] : [];
  return table(headings, [...plans, ...rows.map(([name, key, formatter]) =>
    [name, ...compared.map((plan) => [plan[key], formatter])])], (_, at) => ({ "data-fact": at }));
}

/** Memory of a pipeline's rank over the step: what is held all the time, and the micro-batches' activations. */
function overStep(values, detail, parent) {
  const rank = detail.memory.reduce((best, use, at) => (use.total > detail.memory[best].total ? at : best), 0);
  const use = detail.memory[rank];
  const elsewhere = new Set(["total", "kept_peak", "host", "disk", "activations"]);
  const parts = Object.fromEntries(Object.entries(use).filter(([name, size]) => !elsewhere.has(name) && size));
  parts["one block's work"] = use.activations - use.kept_peak;
  if (!detail.timeline) {
    stacks(parent, "memory by pipeline rank", { formatter: format.bytes, limit: values.capacity_bytes,
      rows: detail.memory.map((each, at) => ({ name: `stage rank ${at}`, parts: Object.fromEntries(
        Object.entries(each).filter(([name, size]) => !["total", "kept_peak", "host", "disk"].includes(name) && size)) })) });
    return;
  }
  const kept = keptOver(detail, rank);
  const names = [...Object.keys(parts), "activations kept"];
  const colors = names.map((_, at) => COLORS[at % COLORS.length]);
  figure(parent, `memory of stage rank ${rank}, the fullest, over the step`, (width, say) => {
    const frame = axes(width, 260, { label: "memory over the step",
      x: { low: 0, high: detail.timeline.total, name: "time", format: format.seconds },
      y: { low: 0, high: Math.max(use.total, values.capacity_bytes) / 2 ** 30, name: "GiB", format: format.number } });
    let low = 0;
    const band = (from, to, color) => frame.node.append(svg("path", { fill: color, d: `M${frame.left} ${frame.y(from)}` +
      `H${frame.right}V${frame.y(to)}H${frame.left}Z` }));
    Object.values(parts).forEach((size, at) => { band(low, low + size / 2 ** 30, colors[at]); low += size / 2 ** 30; });
    let path = `M${frame.left} ${frame.y(low)}`;
    for (const [at, size] of kept) path += `H${frame.x(at).toFixed(1)}V${frame.y(low + size / 2 ** 30).toFixed(1)}`;
    frame.node.append(svg("path", { d: `${path}H${frame.right}V${frame.y(low)}Z`, fill: colors.at(-1) }),
      svg("path", { class: "cursor", d: `M${frame.left} ${frame.y(values.capacity_bytes / 2 ** 30)}H${frame.right}` }));
    pick(frame.node, kept.map(([at]) => [frame.x(at), null]), (index) =>
      say(`at ${format.seconds(kept[index][0])}: activations kept ${format.bytes(kept[index][1])}, all ` +
        format.bytes(low * 2 ** 30 + kept[index][1])));
    return [legend(names, colors), frame.node];
  }, { note: `at most ${format.bytes(use.total)}; ${Object.entries(parts).map(([name, size]) =>
    `${name} ${format.bytes(size)}`).join(", ")}`, values: () => table(["time", "activations kept"],
    kept.map(([at, size]) => [[at, format.seconds], [size, format.bytes]])) });
}

/** [time, bytes] after every action that saves or frees activations. */
function keptOver(detail, rank) {
  const { types, rows } = detail.timeline, { spans } = rows[rank], found = [[0, 0]];
  const split = new Set(); // stages whose weight gradients are split off
  for (let at = 0; at < spans.length; at += 4) if (types[spans[at]].kind === "W") split.add(types[spans[at]].stage);
  let held = 0;
  for (let at = 0; at < spans.length; at += 4) {
    const { kind, stage } = types[spans[at]];
    if (stage === undefined) continue;
    const [saved, deferred] = detail.stage_bytes[stage];
    held += kind === "F" ? saved : kind === "B" ? (split.has(stage) ? deferred : 0) - saved : -deferred;
    found.push([spans[at + 3], held]);
  }
  return found;
}

// --- the cluster

function network(values, plan, parent) {
  const { machine } = values, { axes: traffic } = plan.detail;
  parent.append(el("h2", {}, "the cluster"));
  if (!traffic.length) { parent.append(el("p", {}, "One rank: nothing is sent.")); return; }
  const inside = traffic.reduce((sum, axis) => sum + axis.link_fraction, 0);
  const outside = traffic.reduce((sum, axis) => sum + axis.network_fraction, 0);
  drawCluster(machine, plan, traffic, inside, outside, parent);
  parent.append(table(["axis", "ranks", "apart", "sent by a rank", "inside a domain", "domains", "link busy", "network busy"],
    traffic.map((axis) => [axis.axis, [axis.degree, String], [axis.stride, String], [axis.sent_bytes, format.bytes],
      [axis.local, String], [axis.domains, String], [axis.link_fraction, format.percent],
      [axis.network_fraction, format.percent]])));
}

function heat(fraction) { // of a link that is busy: from the line's colour to the hot one
  return `color-mix(in srgb, var(--hot) ${Math.round(100 * Math.min(1, fraction))}%, var(--line))`;
}

function drawCluster(machine, plan, traffic, inside, outside, parent) {
  const domains = Math.max(1, Math.round((machine.hosts * machine.host_size) / machine.domain));
  picture(parent, "links by the share of the step that they are busy", (node, width, note) => {
    const across = Math.min(domains, Math.max(1, Math.floor(width / 150)));
    const wide = width / across, drawn = Math.min(machine.domain, 16), perRow = Math.min(drawn, 4);
    const rows = Math.ceil(drawn / perRow), size = Math.min(26, (wide - 40) / perRow);
    const top = domains > 1 ? 78 : 8, high = rows * size + 46, height = top + high + 26;
    const ofStep = (fraction) => `${format.percent(fraction)} of the step`;
    if (domains > 1) {
      const text = machine.topology === "ring" ? "cables from host to host" : "switches";
      node.append(svg("rect", { x: 6, y: 4, width: width - 12, height: 26, rx: 4, fill: heat(outside) }),
        svg("text", { x: width / 2, y: 21, "text-anchor": "middle" }, `${text}: busy ${ofStep(outside)}`));
      note(width / 2, 16, `network, ${format.bytes(machine.network_bytes_per_s)}/s per host: ${traffic
        .filter((axis) => axis.network_fraction).map((axis) => `${axis.axis} ${ofStep(axis.network_fraction)}`)
        .join(", ") || "idle"}`);
    }
    const stage = (rank) => Math.floor(rank / plan.detail.ranks_per_stage);
    for (let at = 0; at < across; at++) {
      const domain = at === across - 1 ? domains - 1 : at, left = at * wide + 8, middle = left + (wide - 16) / 2;
      if (domains > 1) {
        node.append(svg("path", { d: `M${middle} 30V${top}`, stroke: heat(outside), "stroke-width": 7 }));
      }
      node.append(svg("rect", { x: left, y: top, width: wide - 16, height: high, rx: 5, fill: "none", class: "grid" }),
        svg("rect", { x: left + 8, y: top + high - 14, width: wide - 32, height: 8, rx: 3, fill: heat(inside) }));
      note(middle, top + high - 10, `links between devices of a domain, ${format.bytes(machine.link_bytes_per_s)}/s each: ` +
        (traffic.filter((axis) => axis.link_fraction).map((axis) => `${axis.axis} ${ofStep(axis.link_fraction)}`)
          .join(", ") || "idle"));
      for (let device = 0; device < drawn; device++) {
        const rank = domain * machine.domain + device;
        const x = middle - (perRow * size) / 2 + (device % perRow) * size, y = top + 22 + Math.floor(device / perRow) * size;
        node.append(svg("rect", { x: x + 1, y: y + 1, width: size - 2, height: size - 2, rx: 3,
          fill: COLORS[stage(rank) % COLORS.length] }, svg("title", {}, `rank ${rank}`)));
        note(x + size / 2, y + size / 2, `rank ${rank}: stage rank ${stage(rank)} of the pipeline, on ${machine.device}`);
      }
      const name = at === across - 1 && domains > across ? `... domain ${domains - 1}` : `domain ${domain}`;
      node.append(svg("text", { x: left + 6, y: top + 15 }, name),
        svg("text", { class: "muted", x: left + 2, y: top + high + 17 }, `${machine.domain} devices`));
    }
    return [height];
  }, { note: `colour of devices: their stage of the pipeline. Busiest: inside domains ${format.percent(inside)}, ` +
    `between them ${format.percent(outside)} of the step` });
}
