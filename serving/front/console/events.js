// What has happened, newest first. New events are said politely, one at a time, and not those of the past.

import { byId, el, say, time } from "./dom.js";

const NAMES = {
  opened: "opened",
  closed: "closed",
  moved: "moved",
  taken_over: "taken over",
  drained: "drains",
  demoted: "demoted",
  promoted: "promoted",
  replica_up: "replica up",
  replica_down: "replica down",
  audit: "audit",
};
const MOST_SHOWN = 300;
const ANNOUNCE_MS = 2000;

export class Events {
  // `onSession` is called with the id, the tenant and the request of a session that was clicked. The request is null if
  // the session is not a request of a tree.
  constructor(onSession) {
    this.onSession = onSession;
    this.list = byId("events");
    this.kinds = byId("kinds");
    this.kinds.append(el("option", { value: "" }, "all"));
    this.kinds.append(...Object.entries(NAMES).map(([kind, name]) => el("option", { value: kind }, name)));
    this.kinds.addEventListener("change", () => this.filter());
    this.unsaid = null;
    this.timer = null;
  }

  clear() {
    this.list.replaceChildren();
  }

  add(event, isNew) {
    const line = el(
      "li",
      { class: `event ${event.kind}`, "data-kind": event.kind },
      el("time", {}, time(event.at)),
      el("b", {}, NAMES[event.kind] ?? event.kind),
      el("span", { class: "what" }, ...this.what(event)),
    );
    line.hidden = !this.fits(event.kind);
    this.list.prepend(line);
    while (this.list.children.length > MOST_SHOWN) this.list.lastElementChild.remove();
    if (isNew) this.announce(line.querySelector("b").textContent + " " + line.querySelector(".what").textContent);
  }

  what(event) {
    const { session, rid, tenant, replica, to, detail } = event;
    const parts = [];
    if (session !== null) {
      const id = rid === null ? session : `${session} · ${rid}`;
      const name = tenant ? `${id} of ${tenant}` : id;
      const onclick = () => this.onSession(session, tenant, rid);
      parts.push(el("button", { type: "button", class: "inline", onclick }, name));
    }
    if (replica !== null) parts.push(to === null ? replica : `from ${replica}`);
    if (to !== null) parts.push(`to ${to}`);
    if (detail) parts.push(detail);
    return parts.flatMap((part, index) => (index ? [" · ", part] : [part]));
  }

  fits(kind) {
    return !this.kinds.value || this.kinds.value === kind;
  }

  filter() {
    for (const line of this.list.children) line.hidden = !this.fits(line.dataset.kind);
  }

  announce(text) {
    this.unsaid = text;
    this.timer ??= setTimeout(() => {
      this.timer = null;
      say(byId("announce"), this.unsaid);
    }, ANNOUNCE_MS);
  }
}
