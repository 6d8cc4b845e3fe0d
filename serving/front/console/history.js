// One session: what was said in it, and what can be done with it: fork, rewind, close.

import { sessionPath } from "./api.js";
import { byId, careful, count, el, plural, say, sizeOfKv } from "./dom.js";

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
    // What is done with a whole session. A request of a tree is a row, too, but these would act on the whole tree.
    this.whole = [
      el("button", { type: "button", class: "main", onclick: () => this.on.chat(this.row) }, "Chat in it"),
      el("button", { type: "button", onclick: () => this.fork(null) }, "Fork"),
      careful("Close it", "Really close it?", "", () => this.end(), { class: "danger" }),
    ];
    const hide = el("button", { type: "button", onclick: () => this.leave() }, "Hide");
    byId("history-buttons").append(...this.whole, hide);
  }

  async open(row) {
    this.row = row;
    this.section.hidden = false;
    this.section.focus({ preventScroll: true });
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
    const list = byId("turns");
    const held = list.contains(document.activeElement) ? document.activeElement.dataset.does : null;
    list.replaceChildren(...turns, ...(rest.length ? [el("li", {}, ...rest)] : []));
    if (held) (list.querySelector(`[data-does="${held}"]`) ?? this.section).focus({ preventScroll: true });
    if (!turns.length && !rest.length) list.append(el("li", { class: "quiet" }, "Nothing was said yet."));
  }

  turn(checkpoint, said) {
    const name = checkpoint.turn === null ? "a turn of its parent" : `turn ${checkpoint.turn}`;
    const place = checkpoint.turn === null ? { length: checkpoint.tokens } : { turn: checkpoint.turn };
    const does = (what) => ({ "data-does": `${what}-${checkpoint.tokens}` });
    const fork = { type: "button", "aria-label": `Fork here, ${name}`, onclick: () => this.fork(place), ...does("fork") };
    const rewind = () => this.rewind(place);
    const buttons = [
      el("button", fork, "Fork here"),
      careful("Rewind to here", "Really rewind?", name, rewind, { class: "danger", ...does("rewind") }),
    ];
    return el(
      "li",
      {},
      el(
        "div",
        { class: "bar-title" },
        el("span", { class: "quiet" }, `${name}, ${count(checkpoint.tokens)} tokens`),
        this.row.rid === null ? el("span", { class: "buttons" }, ...buttons) : null,
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

  async end() {
    const { session_id: id, tenant } = this.row;
    await this.tried(async () => {
      await this.api.call("DELETE", sessionPath(id), { tenant });
      if (this.shows(id, tenant)) this.leave();
    });
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
  return el("div", { class: `message ${role}` }, el("b", {}, role), " ", el("span", { dir: "auto" }, told.join("\n")));
}
