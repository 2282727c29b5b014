// Timelines of steps: a row per rank, a bar per action, on a canvas that holds a hundred thousand of them.
// A timeline is {title, unit, types: [{name, kind, color, facts}], rows: [{name, spans}]}, where `spans` is flat:
// type, micro-batch, start, end of one action after the other.

const ROW = 22, LABELS = 20, HATCH = "#8884";

function timelines(parent, each) {
  const used = new Set(each.flatMap((one) => one.rows.flatMap((row) => row.spans.filter((_, at) => at % 4 === 0)
    .map((type) => one.types[type]))));
  const shown = new Map([...used].map((type) => [type.name, null])); // in order of appearance
  for (const { name, color } of [...used].sort((one, other) => other.stage - one.stage)) shown.set(name, color);
  if (each[0].exposed) shown.set("exposed communication", each[0].exposed).set("hidden communication", each[0].hidden);
  shown.set("idle", HATCH);
  parent.append(legend([...shown.keys()], [...shown.values()]));
  const high = Math.max(...each.map((one) => end(one)));
  each.forEach((one) => timeline(parent, one, high));
}

function end(one) {
  let high = 0;
  for (const row of one.rows) for (let at = 3; at < row.spans.length; at += 4) high = Math.max(high, row.spans[at]);
  return high;
}

function timeline(parent, one, high = end(one)) {
  const view = { low: 0, high: high || 1, row: 0, at: -1 };
  const time = (value) => (one.unit === "s" ? format.seconds(value) : format.number(value));
  const height = one.rows.length * ROW + LABELS;
  const describe = (row, at) => {
    const [type, micro, from, to] = one.rows[row].spans.slice(at, at + 4);
    const of = one.types[type];
    return `${one.rows[row].name}: ${of.label}${micro < 0 ? "" : `, micro-batch ${micro}`}, from ${time(from)} to ` +
      `${time(to)}, for ${time(to - from)}${of.facts ? `; ${of.facts}` : ""}`;
  };
  figure(parent, one.title, (width, say) => {
    const label = 8 + POINTS_PER_CHARACTER * Math.max(...one.rows.map((row) => row.name.length));
    const canvas = el("canvas", { tabindex: 0, role: "application", "aria-label": `${one.title}: timeline` });
    const frame = svg("svg", { width, height, role: "presentation" });
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round((width - label) * ratio);
    canvas.height = (height - LABELS) * ratio;
    Object.assign(canvas.style, { left: `${label}px`, width: `${width - label}px`, height: `${height - LABELS}px` });
    const draw = () => {
      paint(canvas, one, view, ratio);
      frame.replaceChildren(...one.rows.map((row, at) => svg("text", { x: 0, y: at * ROW + 15 }, row.name)));
      for (const tick of ticks(view, (width - label) / 90)) {
        const at = label + ((tick - view.low) / (view.high - view.low)) * (width - label);
        if (at > width - 5) continue;
        const anchor = at > width - 40 ? "end" : at < label + 20 ? "start" : "middle";
        frame.append(svg("text", { class: "muted", x: at, y: height - 5, "text-anchor": anchor }, time(tick)));
      }
    };
    const choose = (row, at) => { [view.row, view.at] = [row, at]; say(at < 0 ? "" : describe(row, at)); draw(); };
    canvas.addEventListener("pointermove", (event) => {
      const row = Math.min(one.rows.length - 1, Math.max(0, Math.floor(event.offsetY / ROW)));
      const at = view.low + (event.offsetX / (width - label)) * (view.high - view.low);
      choose(row, find(one.rows[row].spans, at));
    });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [0, -4], ArrowRight: [0, 4], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      const middle = view.at < 0 ? (view.low + view.high) / 2 : one.rows[view.row].spans[view.at + 2];
      if (move) {
        const row = Math.min(one.rows.length - 1, Math.max(0, view.row + move[0]));
        const { spans } = one.rows[row];
        const isNext = row === view.row && view.at >= 0;
        choose(row, isNext ? Math.min(spans.length - 4, Math.max(0, view.at + move[1])) : find(spans, middle, true));
      } else if ("+-0".includes(event.key)) zoom(middle, { "+": 0.5, "-": 2, 0: Infinity }[event.key]);
      else return;
      event.preventDefault();
    });
    const zoom = (middle, times) => {
      const wide = Math.min(high, (view.high - view.low) * times) || 1;
      view.low = Math.min(Math.max(0, middle - wide / 2), Math.max(0, high - wide));
      view.high = view.low + wide;
      draw();
    };
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return; // else the page scrolls
      event.preventDefault();
      zoom(view.low + (event.offsetX / (width - label)) * (view.high - view.low), event.deltaY > 0 ? 1.4 : 0.7);
    }, { passive: false });
    draw();
    return [frame, canvas];
  }, { note: "arrow keys: next action or rank; + - 0 or Ctrl and wheel: zoom" });
}

/** The action at a time, or the nearest before it; -1 if there is none. */
function find(spans, time, nearest = false) {
  let low = 0, high = spans.length / 4 - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (spans[4 * middle + 2] <= time) low = middle; else high = middle - 1;
  }
  const at = 4 * low;
  return spans.length && (nearest || (spans[at + 2] <= time && time <= spans[at + 3])) ? at : -1;
}

function paint(canvas, one, view, ratio) {
  const context = canvas.getContext("2d"), { width } = canvas;
  const scale = width / (view.high - view.low);
  context.clearRect(0, 0, width, canvas.height);
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.font = `${10 * ratio}px system-ui, sans-serif`;
  one.rows.forEach(({ spans }, row) => {
    const top = row * ROW * ratio + ratio, high = (ROW - 3) * ratio;
    context.fillStyle = HATCH;
    context.fillRect(0, top + high / 2 - ratio / 2, width, ratio);
    for (let at = 0; at < spans.length; at += 4) {
      if (spans[at + 3] < view.low || spans[at + 2] > view.high) continue;
      const type = one.types[spans[at]], x = (spans[at + 2] - view.low) * scale;
      const wide = (spans[at + 3] - spans[at + 2]) * scale;
      const gap = wide > 4 * ratio ? ratio : 0;
      context.fillStyle = type.color;
      context.fillRect(x, top, Math.max(wide - gap, 0.6), high);
      if (type.exposed) { // the part of it that waits for communication
        context.fillStyle = one.exposed;
        context.fillRect(x + (wide - gap) * (1 - type.exposed), top, (wide - gap) * type.exposed, high);
      }
      if (type.hidden) {
        context.fillStyle = one.hidden;
        context.fillRect(x, top + high * 0.78, (wide - gap) * type.hidden, high * 0.22);
      }
      const text = spans[at + 1] < 0 ? "" : String(spans[at + 1]);
      if (text && wide > (text.length * 6.5 + 3) * ratio) {
        context.fillStyle = type.ink;
        context.fillText(text, x + (wide * (1 - (type.exposed || 0))) / 2, top + high / 2 + ratio / 2);
      }
    }
  });
  if (view.at >= 0) {
    const spans = one.rows[view.row].spans, x = (spans[view.at + 2] - view.low) * scale;
    context.strokeStyle = getComputedStyle(canvas).color;
    context.lineWidth = 2 * ratio;
    context.strokeRect(x, view.row * ROW * ratio + ratio, Math.max((spans[view.at + 3] - spans[view.at + 2]) * scale, 2),
      (ROW - 3) * ratio);
  }
}
