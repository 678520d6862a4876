// Shows the scores of one target at a time.

/** Half-precision numbers; scores come as shares of the largest of their target. */
function halves(base64) {
  return Float32Array.from(new Uint16Array(bytes(base64).buffer), (half) => {
    const sign = half & 0x8000 ? -1 : 1;
    const exponent = (half >> 10) & 31;
    const fraction = half & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  });
}

// letters without a shape of their own: control letters, and marks that turn the direction of all that follows
const HIDDEN = /[\u0000-\u0008\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** A token as it is shown: white space alone becomes a sign, letters that cannot be seen their code. */
function visible(label) {
  const code = (letter) => `\u27e8${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  const text = label.trim().replace(HIDDEN, code);
  if (text) return text;
  if (!label) return "\u2205";
  return label
    .replace(/\n/g, "\u23ce")
    .replace(/\t/g, "\u21e5")
    .replace(/\s/g, "\u2423");
}

class Example {
  constructor(record, place) {
    Object.assign(this, record);
    this.place = place;
    this.scores = halves(record.scores);
    this.scales = floats(record.scales);
    this.numbers = record.numbers.map((one) => ({ ...one, values: floats(one.values) }));
    this.width = record.keys.reduce((sum, key) => sum + key.labels.length, 0);
    this.largest = this.scales.reduce((most, scale) => Math.max(most, scale), 0);
    this.chosen = data.axes.map(() => 0);
    this.section = document.getElementById(`example-${place}`);
    this.section.append(...data.axes.map((_, axis) => this.control(axis)));
    this.build();
    this.show();
  }

  /** Number of the chosen target among all. */
  get target() {
    return this.chosen.reduce((sum, one, axis) => sum * this.targets[axis].length + one, 0);
  }

  control(axis) {
    return data.axes[axis] === data.token ? this.radios(axis) : this.select(axis);
  }

  name(axis, place) {
    const { at, label } = this.targets[axis][place];
    return label.trim() ? `${at}: ${visible(label)}` : `${at}${label ? `: ${visible(label)}` : ""}`;
  }

  select(axis) {
    const options = this.targets[axis].map((_, place) => this.name(axis, place));
    const choose = (place) => this.choose(axis, place);
    return chooser(`example-${this.place}-axis-${axis}`, `Target ${data.axes[axis]}`, options, choose);
  }

  radios(axis) {
    const group = element("fieldset", { class: "control" }, element("legend", { text: `Target ${data.axes[axis]}` }));
    const list = element("div", { class: "choices" });
    this.targets[axis].forEach(({ at, label }, place) => {
      const input = element("input", { type: "radio", name: `example-${this.place}-axis-${axis}`, value: place });
      input.checked = place === 0;
      input.addEventListener("change", () => this.choose(axis, place));
      const text = element("span", { text: label ? visible(label) : String(at), title: `position ${at}` });
      list.append(element("label", { class: "choice" }, input, text));
    });
    group.append(list);
    return group;
  }

  choose(axis, place) {
    this.chosen[axis] = place;
    this.show();
  }

  build() {
    this.status = element("p", { class: "status", role: "status" });
    this.facts = element("dl");
    this.section.append(this.status);
    this.spans = [];
    for (const key of this.keys) {
      this.section.append(element("h3", { text: key.name }));
      const line = element("p", { class: "tokens" });
      for (const label of key.labels) {
        const span = element("span", { class: "token", text: visible(label) });
        if (/^\s/.test(label)) span.classList.add("apart");
        line.append(span, "\u200b"); // where a line may break
        this.spans.push(span);
      }
      this.section.append(line);
    }
    this.section.append(this.facts);
    this.table = element("details", {}, element("summary", { text: "Scores as a table" }));
    this.table.addEventListener("toggle", () => this.fill());
    this.section.append(this.table);
  }

  show() {
    const target = this.target;
    const scale = this.scales[target];
    const common = document.getElementById("common").checked;
    const shade = common && this.largest > 0 ? scale / this.largest : 1;
    this.spans.forEach((span, place) => {
      const share = this.scores[target * this.width + place];
      const score = share * scale;
      span.title = number(score);
      span.classList.toggle("for", score > 0);
      span.classList.toggle("against", score < 0);
      span.classList.toggle("unknown", !Number.isFinite(share));
      const strength = Number.isFinite(share) ? Math.abs(share) * shade * STRENGTH : 0;
      span.style.setProperty("--strength", `${strength.toFixed(1)}%`);
    });
    const chosen = data.axes.map((axis, n) => `${axis} ${this.name(n, this.chosen[n])}`);
    this.status.textContent = chosen.length ? `Shown: ${chosen.join(", ")}` : "Shown: the only target";
    this.facts.replaceChildren();
    for (const { name, values, magnitude, of } of this.numbers) {
      const value = values[target];
      const whole = of === null ? 0 : Math.abs(this.numbers[of].values[target]);
      const share = whole > 0 && Number.isFinite(value / whole) ? ` (${Number((100 * Math.abs(value / whole)).toPrecision(2))}\u00a0%)` : "";
      const text = (magnitude ? number(value).replace("+", "") : number(value)) + share;
      this.facts.append(element("div", {}, element("dt", { text: name }), element("dd", { text })));
    }
    this.fill();
  }

  fill() {
    this.table.querySelector(".scroll")?.remove();
    if (!this.table.open) return;
    const body = element("tbody");
    let place = 0;
    for (const key of this.keys) {
      for (const label of key.labels) {
        const row = element("tr", {}, element("td", { text: String(place) }), element("td", { text: visible(label) }));
        if (this.keys.length > 1) row.append(element("td", { text: key.name }));
        row.append(element("td", { class: "number", text: this.spans[place].title }));
        body.append(row);
        place += 1;
      }
    }
    const names = ["position", "token", ...(this.keys.length > 1 ? ["part"] : []), "score"];
    const head = element("tr", {}, ...names.map((text) => element("th", { scope: "col", text })));
    const table = element("table", {}, element("thead", {}, head), body);
    this.table.append(scroller("Scores", table));
  }
}

const examples = data.examples.map((record, place) => new Example(record, place));
document.getElementById("common").addEventListener("change", () => examples.forEach((example) => example.show()));
