// The sessions that were used last: sorted, filtered, one chosen.

import { byId, count, el, say, sizeOfKv, span } from "./dom.js";

const COLUMNS = [
  { key: "session_id", name: "Session", text: (row) => row.session_id + (row.rid === null ? "" : ` · ${row.rid}`) },
  { key: "tenant", name: "Tenant", text: (row) => row.tenant || "–" },
  { key: "replica_id", name: "Replica", text: (row) => row.replica_id ?? "–" },
  { key: "epoch", name: "Epoch", text: (row) => count(row.epoch), number: true },
  { key: "tier", name: "Tier", text: (row) => row.tier ?? "–" },
  { key: "tokens", name: "Tokens", text: (row) => count(row.tokens), number: true },
  { key: "kv_pages", name: "Pages", text: (row) => count(row.kv_pages), number: true },
  { key: "size_bytes", name: "KV", text: sizeOfKv, number: true },
  { key: "turns", name: "Turns", text: (row) => count(row.turns), number: true },
  { key: "idle_s", name: "Idle", text: (row) => (row.in_turn ? "in a turn" : span(row.idle_s)), number: true },
];

export const keyOf = (row) => JSON.stringify([row.tenant, row.session_id, row.rid]);

export class Sessions {
  constructor(onChosen) {
    this.onChosen = onChosen;
    this.rows = [];
    this.total = null;
    this.lines = new Map();
    this.sort = { key: "idle_s", down: false };
    this.chosen = null;
    this.section = byId("sessions");
    this.body = byId("rows");
    this.filter = byId("filter");
    this.filter.addEventListener("input", () => this.render());
    this.heads = COLUMNS.map((column) => this.head(column));
    byId("columns").append(...this.heads.map((head) => head.cell));
    const headsUnseen = matchMedia("(max-width: 40rem)"); // as in console.css
    headsUnseen.addEventListener("change", () => this.passOverHeads(headsUnseen.matches));
    this.passOverHeads(headsUnseen.matches);
    const select = byId("sort");
    select.append(...COLUMNS.map((column) => el("option", { value: column.key }, column.name)));
    select.value = this.sort.key;
    select.addEventListener("change", () => this.sortBy(select.value, false));
    this.render();
  }

  show(sessions) {
    this.rows = sessions.rows;
    this.total = sessions.total;
    this.render();
  }

  find(key) {
    return this.rows.find((row) => keyOf(row) === key);
  }

  choose(row) {
    this.chosen = row === null ? null : keyOf(row);
    this.render();
  }

  // No session is chosen any more: the focus goes back to the line of the one that was.
  leave() {
    const line = this.lines.get(this.chosen);
    (line ? line.button : this.section).focus({ preventScroll: true });
    this.choose(null);
  }

  // On a narrow page the heads are not seen, and the Tab key does not stop there.
  passOverHeads(unseen) {
    for (const { cell } of this.heads) cell.firstElementChild.tabIndex = unseen ? -1 : 0;
  }

  head(column) {
    const button = el("button", { type: "button" }, column.name);
    button.addEventListener("click", () =>
      this.sortBy(column.key, this.sort.key === column.key && !this.sort.down),
    );
    return { column, cell: el("th", { scope: "col", class: column.number ? "number" : null }, button) };
  }

  sortBy(key, down) {
    this.sort = { key, down };
    byId("sort").value = key;
    this.render();
  }

  render() {
    const wanted = this.filter.value.trim().toLowerCase();
    const rows = this.rows.filter((row) =>
      COLUMNS.some((column) => column.text(row).toLowerCase().includes(wanted)),
    );
    rows.sort((a, b) => this.order(a, b));
    for (const { column, cell } of this.heads) {
      const sorted = column.key === this.sort.key;
      if (sorted) cell.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    this.place(rows);
    const fewer = rows.length < this.total ? `${count(rows.length)} of ${count(this.total)}` : count(this.total);
    say(byId("sessions-count"), this.total === null ? "" : fewer);
    byId("no-rows").hidden = rows.length > 0;
    say(byId("no-rows"), this.whyNone());
  }

  whyNone() {
    if (this.total === null) return "Nothing is known yet.";
    if (!this.total) return "There is no session.";
    const unseen = this.rows.length < this.total;
    return unseen ? `No session fits, of the ${count(this.rows.length)} that were used last.` : "No session fits.";
  }

  order(a, b) {
    const { key, down } = this.sort;
    const [left, right] = [a[key] ?? "", b[key] ?? ""];
    const order = left < right ? -1 : left > right ? 1 : keyOf(a) < keyOf(b) ? -1 : 1;
    return down ? -order : order;
  }

  // Lines are kept and moved, so that the one that has the focus keeps it. Nothing scrolls for that.
  place(rows) {
    const focused = document.activeElement;
    const there = new Set(rows.map(keyOf));
    for (const [key, line] of this.lines) {
      if (!there.has(key)) {
        line.root.remove();
        this.lines.delete(key);
      }
    }
    rows.forEach((row, index) => {
      const key = keyOf(row);
      if (!this.lines.has(key)) this.lines.set(key, new Line((found) => this.onChosen(found)));
      const line = this.lines.get(key);
      line.show(row, key === this.chosen);
      if (this.body.children[index] !== line.root) {
        this.body.insertBefore(line.root, this.body.children[index] ?? null);
      }
    });
    if (focused !== document.activeElement) {
      (this.body.contains(focused) ? focused : this.section).focus({ preventScroll: true });
    }
  }
}

class Line {
  constructor(onChosen) {
    this.button = el("button", { type: "button", class: "session-name" });
    this.cells = COLUMNS.map((column) =>
      el("td", { "data-label": column.name, class: `${column.key} ${column.number ? "number" : ""}` }),
    );
    this.cells[0].append(this.button);
    this.root = el("tr", { onclick: () => onChosen(this.row) }, ...this.cells);
  }

  show(row, chosen) {
    this.row = row;
    COLUMNS.forEach((column, index) => say(index ? this.cells[index] : this.button, column.text(row)));
    this.root.classList.toggle("chosen", chosen);
    this.button.setAttribute("aria-pressed", chosen);
    this.root.dataset.inTurn = row.in_turn;
  }
}
