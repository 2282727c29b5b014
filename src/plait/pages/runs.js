// `plait report` and `plait compare`: the curves of one run or several, and what one run was made of.
const FACTS = { loss: format.number, validation_loss: format.number, best_validation_loss: format.number, mfu: format.percent };
const NAMES = { tokens_per_s: "tokens/s, median", mfu: "MFU, median" };
const CURVES = [["grad_norm", "gradient norm", format.number], ["lr", "learning rate", (value) => digits(value)],
  ["tokens_per_s", "tokens/s", format.number], ["mfu", "MFU", format.percent], ["loss_scale", "loss scale", format.number],
  ["aux_loss", "auxiliary loss of routers", format.number], ["expert_imbalance", "largest load of an expert, of the mean", format.number]];

PAGES.runs = ({ runs }, main) => {
  const several = runs.length > 1;
  const keys = Object.keys(runs[0].facts).filter((key) => runs.some((run) => run.facts[key] !== null));
  const plans = ["plan", ...runs.map((run) => el("code", {}, run.plan))];
  if (!several) main.append(el("p", {}, plans[1]));
  main.append(table(["", ...runs.map((run) => run.name)], [
    ...keys.map((key) => [NAMES[key] || key.replaceAll("_", " "), ...runs.map((run) => [run.facts[key], FACTS[key] || format.number])]),
    ...(several ? [plans] : [])]));
  curves(runs, several, main);
  if (several) configuration(runs, main);
  else oneRun(runs[0], main);
};

function curves(runs, several, main) {
  const columns = el("div", { class: "columns" });
  main.append(columns);
  const marks = several ? [] : runs[0].events.map((event) => ({ at: event.step, text: `${event.kind}: ${event.text}` }));
  const x = { name: "step", format: format.number };
  const named = (run, name) => (several ? `${run.name}${name ? `, ${name}` : ""}` : name);
  const points = (run, key) => (run.curves[key] || []).map((value, at) => [run.curves.step[at], value]);
  const losses = runs.flatMap((run, at) => [
    { name: several ? run.name : "training", points: points(run, "loss"), color: COLORS[at % COLORS.length] },
    { name: named(run, "validation"), points: run.validation, dashed: true, dots: true, unlisted: several,
      color: COLORS[(several ? at : 1) % COLORS.length] }]);
  lines(columns, `loss, nats per token${several ? " (dashed: validation)" : ""}`, { series: losses, x, y: { name: "loss", format: format.number }, marks, height: 300 });
  for (const [key, title, formatter] of CURVES) {
    lines(columns, title, { x, y: { name: title, format: formatter }, marks, zero: key !== "grad_norm",
      series: runs.map((run) => ({ name: named(run, "") || title, points: points(run, key) })) });
  }
}

function oneRun(run, main) {
  if (run.events.length) {
    main.append(el("h2", {}, "events"), table(["step", "event", ""], run.events.map((event) =>
      [[event.step, String], event.kind, el("span", { class: event.kind === "resumed" ? null : "warning" }, event.text)])));
  }
  if (run.memory) {
    const parts = (use) => Object.fromEntries(Object.entries(use).filter(([name, size]) => size && name !== "total"));
    stacks(main, "memory of the ranks, estimated and measured", { formatter: format.bytes, rows: run.memory.flatMap((group) => {
      const [first, last] = [group.ranks[0], group.ranks.at(-1)];
      const ranks = first === last ? `rank ${first}` : `ranks ${first} to ${last}`;
      return [{ name: `${ranks}, estimated`, parts: parts(group.estimated) },
        { name: `${ranks}, measured`, parts: parts(group.measured) }];
    }) });
  }
  if (run.timelines.length) {
    main.append(el("h2", {}, "a step of the pipeline"));
    timelines(main, run.timelines);
  }
  if (run.sample) main.append(el("h2", {}, "sample of generated text"), el("pre", { tabindex: 0 }, run.sample));
  main.append(el("h2", {}, "configuration"), el("details", {}, el("summary", {}, "recipe"),
    table(["key", "value"], flat(run.recipe).map(([key, value]) => [key, el("code", {}, value)]))));
}

function flat(value, key = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[key, JSON.stringify(value)]];
  return Object.entries(value).flatMap(([name, inner]) => flat(inner, key ? `${key}.${name}` : name));
}

function configuration(runs, main) {
  const recipes = runs.map((run) => new Map(flat(run.recipe)));
  const keys = [...new Set(recipes.flatMap((recipe) => [...recipe.keys()]))];
  const differing = keys.filter((key) => new Set(recipes.map((recipe) => recipe.get(key))).size > 1);
  main.append(el("h2", {}, "what differs in the configurations"), table(["key", ...runs.map((run) => run.name)],
    differing.map((key) => [key, ...recipes.map((recipe) => el("code", {}, recipe.get(key) ?? "-"))])));
}
