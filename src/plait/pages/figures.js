// Figures: curves and tables, one below the other, with their sources and errors.
PAGES.figures = ({ figures }, main) => {
  for (const each of figures) {
    if (each.rows) main.append(el("h2", {}, each.title), table(each.headings, each.rows.map((row) =>
      row.map((cell) => (typeof cell === "number" ? [cell, format.number] : cell)))));
    else chart(each, main);
    const source = each.source && `Source: ${each.source}.`;
    if (each.note || source) main.append(el("p", {}, [each.note, source].filter(Boolean).join(" ")));
  }
};

function chart({ title, x, y, curves, names, errors }, main) {
  const named = new Map(names);
  const axis = ({ name, unit, log }) => ({ name, log, format: format[unit] });
  const read = (value) => (named.has(value) ? `${format[x.unit](value)} (${named.get(value)})` : format[x.unit](value));
  const color = (curve) => { // a line has the colour of the dots that it is compared with
    const name = curve.style === "dashed" && curve.expected ? curve.expected : curve.name;
    return COLORS[curves.findIndex((each) => each.name === name) % COLORS.length];
  };
  lines(main, title, { height: 300, x: { ...axis(x), read }, y: axis(y), zero: !y.log, series: curves.map((curve) =>
    ({ name: curve.name, points: curve.points, color: color(curve), dashed: curve.style === "dashed",
      dots: curve.style !== "dashed", bare: curve.style === "dots" })) });
  if (errors.length) main.append(table(["", "mean error"], errors.map(([name, error]) => [name, [error, format.percent]])));
}
