// One session: what was said in it, and what can be done with it: fork, rewind, close.

import { sessionPath } from "./api.js";
import { byId, count, el, plural, say, sizeOfKv } from "./dom.js";

const GONE = "This session has ended, or was not used for long.";

export class History {
  // `on` has chat(row), forked(id, tenant), closed(), wantsKey(error).
  constructor(api, on) {
    this.api = api;
    this.on = on;
    this.row = null;
    this.asked = 0;
    this.section = byId("history");
    this.said = byId("history-said");
    this.close = el("button", { type: "button", class: "danger", onclick: () => this.confirmClose() }, "Close it");
    // What is done with a whole session. A request of a tree is a row, too, but these would act on the whole tree.
    this.whole = [
      el("button", { type: "button", class: "main", onclick: () => this.on.chat(this.row) }, "Chat in it"),
      el("button", { type: "button", onclick: () => this.fork(null) }, "Fork"),
      this.close,
    ];
    const hide = el("button", { type: "button", onclick: () => this.leave() }, "Hide");
    byId("history-buttons").append(...this.whole, hide);
  }

  async open(row) {
    this.row = row;
    this.section.hidden = false;
    this.resetClose();
    for (const button of this.whole) button.hidden = row.rid !== null;
    say(byId("history-title"), `Session ${row.session_id}${row.rid === null ? "" : ` · ${row.rid}`}`);
    say(this.said, "");
    byId("turns").replaceChildren();
    this.show(row);
    await this.load();
    this.section.scrollIntoView({ block: "nearest" });
  }

  // The newest figures of the session that is shown.
  show(row) {
    const grown = row.turns !== this.row.turns;
    this.row = row;
    if (this.said.textContent === GONE) say(this.said, "");
    const pages = row.kv_pages === null ? "" : `, ${plural(row.kv_pages, "page")}`;
    say(
      byId("history-facts"),
      `${plural(row.turns, "turn")}, ${plural(row.tokens, "token")}; KV ${sizeOfKv(row)}${pages}, ` +
        `tier ${row.tier ?? "unknown"}; replica ${row.replica_id ?? "–"}, epoch ${row.epoch}`,
    );
    if (grown) this.load();
  }

  gone() {
    say(this.said, GONE);
  }

  leave() {
    this.row = null;
    this.section.hidden = true;
    this.on.closed();
  }

  async load() {
    const asked = ++this.asked;
    const { session_id: id, tenant, rid } = this.row;
    const query = rid === null ? { messages: true } : { messages: true, rid };
    await this.tried(async () => {
      const session = await this.api.json("GET", sessionPath(id), { tenant, query });
      if (asked === this.asked && this.row) this.render(session);
    });
  }

  render({ messages, checkpoints }) {
    let told = 0;
    const turns = checkpoints.map((checkpoint) => {
      const said = messages.slice(told, checkpoint.messages);
      told = Math.max(told, checkpoint.messages);
      return this.turn(checkpoint, said);
    });
    const rest = messages.slice(told).map(message);
    byId("turns").replaceChildren(...turns, ...(rest.length ? [el("li", {}, ...rest)] : []));
    if (!turns.length && !rest.length) byId("turns").append(el("li", { class: "quiet" }, "Nothing was said yet."));
  }

  turn(checkpoint, said) {
    const name = checkpoint.turn === null ? "a turn of its parent" : `turn ${checkpoint.turn}`;
    const place = checkpoint.turn === null ? { length: checkpoint.tokens } : { turn: checkpoint.turn };
    const button = (text, does) =>
      el("button", { type: "button", "aria-label": `${text}, ${name}`, onclick: does }, text);
    const buttons =
      this.row.rid === null
        ? [button("Fork here", () => this.fork(place)), button("Rewind to here", () => this.rewind(place))]
        : [];
    return el(
      "li",
      {},
      el(
        "div",
        { class: "bar-title" },
        el("span", { class: "quiet" }, `${name}, ${count(checkpoint.tokens)} tokens`),
        el("span", { class: "buttons" }, ...buttons),
      ),
      ...said.map(message),
    );
  }

  async fork(place) {
    const { session_id: id, tenant } = this.row;
    await this.tried(async () => {
      const forked = await this.api.json("POST", sessionPath(id, "/fork"), { tenant, body: place ?? {} });
      this.tell(
        id,
        tenant,
        `Forked: ${forked.session_id} has ${count(forked.tokens)} tokens, of which ${count(forked.cached_tokens)} have KV.`,
      );
      this.on.forked(forked.session_id, tenant);
    });
  }

  async rewind(place) {
    const { session_id: id, tenant } = this.row;
    await this.tried(async () => {
      const rewound = await this.api.json("POST", sessionPath(id, "/rewind"), { tenant, body: place });
      if (this.tell(id, tenant, `Rewound: ${count(rewound.tokens)} tokens are left.`)) await this.load();
    });
  }

  // The first click asks, the second closes.
  async confirmClose() {
    if (!this.close.dataset.asked) {
      this.close.dataset.asked = "yes";
      this.close.textContent = "Really close it?";
      return;
    }
    const { session_id: id, tenant } = this.row;
    await this.tried(async () => {
      await this.api.call("DELETE", sessionPath(id), { tenant });
      if (this.shows(id, tenant)) this.leave();
    });
    if (this.shows(id, tenant)) this.resetClose();
  }

  resetClose() {
    delete this.close.dataset.asked;
    this.close.textContent = "Close it";
  }

  // Whether this session is the one that is shown. Meanwhile another one may have been opened.
  shows(id, tenant) {
    return this.row !== null && this.row.session_id === id && this.row.tenant === tenant;
  }

  tell(id, tenant, text) {
    const shown = this.shows(id, tenant);
    if (shown) say(this.said, text);
    return shown;
  }

  async tried(work) {
    const { session_id: id, tenant } = this.row;
    try {
      await work();
    } catch (error) {
      if (error.wantsKey) this.on.wantsKey(error);
      this.tell(id, tenant, error.message);
    }
  }
}

// A message may have words, or calls of tools, or both.
function message({ role, content, tool_calls: calls }) {
  const words = typeof content === "string" ? content : JSON.stringify(content ?? undefined);
  const told = [words, calls?.length ? JSON.stringify(calls) : null].filter((part) => part);
  return el("div", { class: `message ${role}` }, el("b", {}, role), " ", told.join("\n"));
}
