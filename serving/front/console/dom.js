// Elements and figures as text. Text only ever becomes text: nothing here parses markup.

export function el(tag, fields = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// A button for what cannot be undone: the first click asks, the second does it. It asks no longer once the focus leaves.
// `of` tells a screen reader what it is about.
export function careful(name, question, of, does, fields = {}) {
  const button = el("button", { type: "button", ...fields });
  const ask = (asks) => {
    const text = asks ? question : name;
    say(button, text);
    button.setAttribute("aria-label", of ? `${text}, ${of}` : text);
    button.dataset.asks = asks;
  };
  button.addEventListener("blur", () => ask(false));
  button.addEventListener("click", () => {
    const sure = button.dataset.asks === "true";
    ask(!sure);
    if (sure) does();
  });
  ask(false);
  return button;
}

export const byId = (id) => document.getElementById(id);

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const grouped = new Intl.NumberFormat("en");
export const count = (number) => (number === null || number === undefined ? "–" : grouped.format(number));

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

export function bytes(number) {
  if (number === null || number === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit === 0 || number >= 100 ? Math.round(number) : number.toFixed(1)} ${units[unit]}`;
}

// A session's KV. Its owner tells the size after a turn: until then pages may be there whose size is not known.
export const sizeOfKv = (row) => (row.size_bytes || row.kv_pages === 0 ? bytes(row.size_bytes) : "–");

export function span(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

export const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
export const time = (unixS) => clock.format(new Date(unixS * 1000));
