// `plait schedule --html`: simulated and measured timelines of one schedule, and what every rank holds.
PAGES.schedule = (values, main) => {
  const time = (value) => (values.unit === "s" ? format.seconds(value) : format.number(value));
  main.append(table(["", ...values.timelines.map((one) => one.title)], [
    ["total", ...values.timelines.map((one) => [one.total, time])],
    ["bubble", ...values.timelines.map((one) => [one.bubble, format.percent])],
  ]));
  timelines(main, values.timelines);
  main.append(el("h2", {}, "by rank"), table(["rank", "stages", "in flight", "buffers",
    ...values.timelines.map((one) => `idle, ${one.title}`)], values.ranks.map((rank, at) => [`rank ${at}`,
    rank.stages.join(" "), [rank.in_flight, String], [rank.buffers, String],
    ...values.timelines.map((one) => [one.rows[at].idle, time])])));
};
