// Shows one quantity of one sort of maps at a time: a chart of all heads over layers, and a table for every kind of key.

const MARKS = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "M-3.5 -3.5h7v7h-7z", "M0 -4.5l4.3 7.8h-8.6z", "M0 -4.8l4 4.8l-4 4.8l-4 -4.8z",
  "M0 4.5l4.3 -7.8h-8.6z", "M-1.4 -4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",
  "M-4.2 -1.2h8.4v2.4h-8.4z", "M-1.2 -4.2h2.4v8.4h-2.4z",
];
const kinds = [...new Set(data.sides.flatMap((side) => side.kinds))];
const sides = data.sides.map((side) => ({ ...side, pairs: doubles(side.pairs), queries: doubles(side.queries) }));
const chosen = { side: 0, quantity: Object.keys(data.sides[0].table)[0], targets: data.targets.map(() => null) };
const unpacked = new Map();

function drawn(tag, properties, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Numbers of the targets that are chosen, in the order of the packed ones; without a choice along an axis, all of it. */
function places() {
  let found = [0];
  data.targets.forEach((size, axis) => {
    const own = chosen.targets[axis] === null ? [...Array(size).keys()] : [chosen.targets[axis]];
    found = found.flatMap((before) => own.map((one) => before * size + one));
  });
  return found;
}

/** `[layer][head][kind]`: means over the chosen targets; null where no pair is of the kind. */
function values(side) {
  const key = `${chosen.side} ${chosen.quantity}`;
  if (!unpacked.has(key)) unpacked.set(key, doubles(side.table[chosen.quantity]));
  const packed = unpacked.get(key);
  const cells = side.layers.length * side.heads * side.kinds.length;
  const each = cells ? packed.length / cells : 1;
  const taken = each === 1 ? [0] : places();
  const value = (cell) => {
    if (!side.pairs[cell]) return null;
    return taken.reduce((sum, place) => sum + packed[cell * each + place], 0) / taken.length;
  };
  return side.layers.map((_, layer) => [...Array(side.heads).keys()].map((head) => side.kinds.map(
    (_, kind) => value((layer * side.heads + head) * side.kinds.length + kind),
  )));
}

function mean(all) {
  const there = all.filter((one) => one !== null);
  return there.length ? there.reduce((sum, one) => sum + one, 0) / there.length : null;
}

const signed = () => data.signed.includes(chosen.quantity);
const read = (value) => (value === null ? "no pair" : signed() ? number(value) : number(value).replace("+", ""));

/** A cell: in units of the power of ten that the heading names. */
function cell(value, power, largest, tooltip, name = "") {
  const made = element("td", { class: `number ${name}`, title: tooltip });
  if (value === null) made.textContent = "-";
  else if (!Number.isFinite(value)) made.textContent = Number.isNaN(value) ? "nan" : read(value);
  else {
    const text = (Math.abs(value) / 10 ** power).toFixed(2);
    made.textContent = (value < 0 ? "\u2212" : signed() ? "+" : "") + text;
    if (value && largest) {
      made.classList.add(value > 0 ? "for" : "against");
      made.style.setProperty("--strength", `${((STRENGTH * Math.abs(value)) / largest).toFixed(1)}%`);
    }
  }
  if (value !== null && !Number.isFinite(value)) made.classList.add("unknown");
  return made;
}

/** The table of one kind: a row for every layer, a column for every head, and their mean. */
function tableOf(side, kind, all, power, largest) {
  const heads = [...Array(side.heads).keys()];
  const head = element("tr", {}, ...["layer", "mean", ...heads.map((one) => `h ${one}`)].map(
    (text, column) => element("th", { scope: "col", class: column ? "number" : "", text }),
  ));
  const body = element("tbody");
  side.layers.forEach((layer, row) => {
    const own = all[row].map((one) => one[kind]);
    const line = element("tr", {}, element("th", { scope: "row", text: String(layer), title: side.maps[row] }));
    const middle = mean(own);
    line.append(cell(middle, power, largest, `layer ${layer}, mean of the heads: ${read(middle)}`, "mean"));
    own.forEach((value, one) => {
      const pairs = side.pairs[(row * side.heads + one) * side.kinds.length + kind];
      line.append(cell(value, power, largest, `layer ${layer}, head ${one}: ${read(value)}; ${pairs} pairs`));
    });
    body.append(line);
  });
  const title = side.kinds[kind];
  const table = element("table", { class: "numbers heads" }, element("thead", {}, head), body);
  return element("section", { "aria-label": title }, element("h3", { text: title }), scroller(`Heads, ${title}`, table));
}

/** Where numbers lie from 0 to 1, and the numbers at the lines of the grid; logarithmic where a few outgrow all others. */
function scale(all) {
  const sorted = all.filter((one) => one > 0).sort((a, b) => a - b);
  const most = sorted.at(-1) ?? 0;
  if (!signed() && chosen.quantity !== "attention" && most > 30 * sorted[sorted.length >> 1]) {
    const low = Math.max(Math.floor(Math.log10(sorted[0])), Math.ceil(Math.log10(most)) - 8);
    const high = Math.ceil(Math.log10(most));
    const step = Math.ceil((high - low) / 5);
    const ticks = [];
    for (let power = low; power <= high; power += step) ticks.push(10 ** power);
    return { ticks, at: (value) => Math.max(0, (Math.log10(value) - low) / (high - low || 1)), note: ", logarithmic" };
  }
  const highest = all.reduce((found, one) => Math.max(found, one), 0);
  const top = chosen.quantity === "attention" ? 1 : highest || (signed() ? 0 : 1);
  const bottom = signed() ? all.reduce((found, one) => Math.min(found, one), 0) : 0;
  const rough = (top - bottom || 1) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= rough * 0.999);
  const ticks = [];
  for (let n = Math.ceil(bottom / step - 1e-9); n * step <= top + step * 1e-9; n += 1) ticks.push(n * step);
  return { ticks, at: (value) => (value - bottom) / (top - bottom || 1), note: "" };
}

function tickText(value) {
  const size = Math.abs(value);
  const short = Number(value.toPrecision(3));
  const text = size && (size < 1e-3 || size >= 1e4) ? short.toExponential() : String(short);
  return text.replace("e+", "e").replaceAll("-", "\u2212");
}

/** The chart: a mark for every head, a line through their mean, a color and a shape for every kind. */
function chart(side, all) {
  const finite = all.flat(2).filter((one) => one !== null && Number.isFinite(one));
  const { ticks, at, note } = scale(finite);
  const [left, top, high, wide] = [64, 12, 240, Math.max(28, Math.min(72, 14 * side.kinds.length + 8), 300 / side.layers.length)];
  const width = left + wide * side.layers.length + 8;
  const y = (value) => top + high * (1 - at(value));
  const svg = drawn("svg", { class: "chart", width, height: high + 56, viewBox: `0 0 ${width} ${high + 56}`, role: "img" });
  const label = data.labels[chosen.quantity];
  svg.setAttribute("aria-label", `${label} over layers; the tables have its numbers`);
  for (const tick of ticks) {
    svg.append(drawn("line", { class: "grid", x1: left, x2: width - 8, y1: y(tick), y2: y(tick) }));
    svg.append(drawn("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, tickText(tick)));
  }
  side.layers.forEach((layer, row) => {
    svg.append(drawn("text", { x: left + wide * (row + 0.5), y: high + top + 18, "text-anchor": "middle" }, String(layer)));
  });
  svg.append(drawn("text", { x: left + (wide * side.layers.length) / 2, y: high + top + 38, "text-anchor": "middle" }, "layer"));
  const means = [];
  side.kinds.forEach((name, kind) => {
    const number = kinds.indexOf(name) % MARKS.length;
    const points = [];
    side.layers.forEach((_, row) => {
      const x = left + wide * (row + 0.5 + (0.8 * (kind - (side.kinds.length - 1) / 2)) / side.kinds.length);
      const own = all[row].map((one) => one[kind]).filter((one) => one !== null && Number.isFinite(one));
      const mark = (value, size, more) => drawn("path", {
        class: `mark kind${number} ${more}`, d: MARKS[number], transform: `translate(${x} ${y(value)}) scale(${size})`,
      });
      svg.append(...own.map((value) => mark(value, 0.6, "dot")));
      if (own.length) {
        points.push(`${x},${y(mean(own))}`);
        means.push(mark(mean(own), 1, "middle"));
      }
    });
    svg.append(drawn("polyline", { class: `line kind${number}`, points: points.join(" ") }));
  });
  svg.append(...means);
  const legend = element("ul", { class: "legend" }, ...side.kinds.map((name) => {
    const number = kinds.indexOf(name) % MARKS.length;
    const mark = drawn("path", { class: `mark kind${number}`, d: MARKS[number] });
    return element("li", {}, drawn("svg", { viewBox: "-5 -5 10 10", "aria-hidden": "true" }, mark), ` ${name}`);
  }));
  const caption = element("figcaption", { text: `${label}${note}: a small mark for every head, a line through their mean.` });
  return element("figure", {}, caption, legend, scroller("Chart over layers", svg));
}

const shown = element("div");
const status = element("p", { class: "status", role: "status" });

function show() {
  const side = sides[chosen.side];
  const all = values(side);
  const largest = all.flat(2).reduce((most, one) => (Number.isFinite(one) ? Math.max(most, Math.abs(one)) : most), 0);
  const power = chosen.quantity === "attention" || !largest ? 0 : Math.floor(Math.log10(largest));
  const unit = power ? `, in units of 1e${power}`.replace("-", "\u2212") : "";
  const split = doubles(side.table[chosen.quantity]).length > side.pairs.length; // attention itself has no targets
  const targets = !split ? [] : data.targets.map((_, axis) => (chosen.targets[axis] === null ? "all" : chosen.targets[axis]));
  const which = targets.length ? `, target ${targets.join(", ")}${targets.includes("all") ? " (mean)" : ""}` : "";
  const sort = side.name.startsWith("self") ? "self-attention" : `${side.name} attention`;
  status.textContent = `Shown: ${sort}, ${chosen.quantity.replaceAll("_", " ")}${which}${unit}`;
  const queries = side.queries.reduce((most, one) => Math.max(most, one), 0);
  const about = `${side.layers.length} layers of ${side.heads} heads, ${queries} queries.`;
  const absent = side.absent.length ? ` No query sees a key of: ${side.absent.join(", ")}.` : "";
  const tables = side.kinds.map((_, kind) => tableOf(side, kind, all, power, largest));
  shown.replaceChildren(
    element("p", { text: about + absent }), chart(side, all), element("div", { class: "kinds" }, ...tables),
  );
}

function change(name, value) {
  chosen[name] = value;
  show();
}

const controls = element("div");
if (sides.length > 1) {
  controls.append(chooser("side", "Maps", sides.map((side) => side.name), (place) => change("side", place)));
}
const quantities = Object.keys(sides[0].table);
const texts = quantities.map((name) => `${name.replaceAll("_", " ")}: ${data.labels[name]}`);
controls.append(chooser("quantity", "Quantity", texts, (place) => change("quantity", quantities[place])));
data.targets.forEach((size, axis) => {
  const label = data.targets.length > 1 ? `Target, axis ${axis}` : "Target";
  const options = ["all, their mean", ...[...Array(size).keys()].map(String)];
  const choose = (place) => change("targets", chosen.targets.map((one, n) => (n !== axis ? one : place ? place - 1 : null)));
  controls.append(chooser(`target-${axis}`, label, options, choose));
});
document.getElementById("report").append(controls, status, shown);
show();
