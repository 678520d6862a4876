"use strict";
// Shared by the scripts of pages. Texts of users only ever become text nodes or attributes.

const data = JSON.parse(document.getElementById("data").textContent);
const STRENGTH = 70; // percent of the fill at the largest number; style sheet and contrast go by it

function bytes(base64) {
  const text = atob(base64);
  return Uint8Array.from(text, (letter) => letter.charCodeAt(0));
}

const floats = (base64) => new Float32Array(bytes(base64).buffer);
const doubles = (base64) => new Float64Array(bytes(base64).buffer);

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") made.textContent = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function number(value) {
  if (Number.isNaN(value)) return "not a number";
  const text = Math.abs(value).toPrecision(3);
  const sign = value < 0 ? "\u2212" : value > 0 ? "+" : "";
  return sign + (text.includes("e") ? text.replace("e+", "e").replace("-", "\u2212") : String(Number(text)));
}

/** A chooser with its label; `choose` gets the number of the option. */
function chooser(id, label, options, choose) {
  const made = element("select", { id });
  options.forEach((text, place) => made.append(element("option", { value: place, text })));
  made.addEventListener("change", () => choose(Number(made.value)));
  return element("p", { class: "control" }, element("label", { for: id, text: label }), made);
}

/** What scrolls by itself, also by keyboard. */
function scroller(label, ...children) {
  return element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": label }, ...children);
}
