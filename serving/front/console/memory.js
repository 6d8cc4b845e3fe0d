// The map of KV: each replica's pools as stacked bars by account, and its tiers below the device.

import { byId, bytes, count, el, plural, say, share, time } from "./dom.js";

const ACCOUNTS = [
  ["session", "session", "private pages of idle sessions"],
  ["in_flight", "in flight", "pages of turns that run"],
  ["protected", "protected", "shared prefixes in use"],
  ["cached", "cached", "shared prefixes that give way"],
  ["free", "free", "nobody's"],
  ["leaked", "leaked", "pages without an account, which there should never be"],
];

export class Memory {
  constructor() {
    this.replicas = byId("replicas");
    this.shown = new Map();
    this.before = new Map();
    byId("legend").append(
      ...ACCOUNTS.map(([account, name, text]) =>
        el("li", { title: text }, el("i", { class: `swatch ${account}`, "aria-hidden": "true" }), name),
      ),
    );
  }

  show(state) {
    const names = state.replicas.map((each) => each.replica);
    for (const [name, card] of this.shown) {
      if (!names.includes(name)) {
        card.root.remove();
        this.shown.delete(name);
        this.before.delete(name);
      }
    }
    if (names.length && !this.shown.size) this.replicas.replaceChildren();
    for (const replica of state.replicas) {
      if (!this.shown.has(replica.replica)) {
        const card = new ReplicaCard(replica.replica);
        this.shown.set(replica.replica, card);
        this.replicas.append(card.root);
      }
      this.shown.get(replica.replica).show(replica, this.rates(replica, state.at), state.at);
    }
    if (!names.length) this.replicas.replaceChildren(el("p", { class: "quiet" }, "There is no replica."));
    alarm(state.replicas);
  }

  // Tokens a second since the state before.
  rates(replica, at) {
    const before = this.before.get(replica.replica);
    if (replica.answers) this.before.set(replica.replica, { at, replica });
    if (!before || !replica.answers || at <= before.at) return null;
    const since = (name) => Math.max(0, replica[name] - before.replica[name]) / (at - before.at);
    return { generated: since("generated_tokens"), prefill: since("prefill_tokens") };
  }
}

class ReplicaCard {
  constructor(name) {
    this.state = el("span", { class: "state" });
    this.load = el("p", { class: "quiet load" });
    this.bars = el("div", { class: "bars" });
    this.pools = new Map();
    this.tiers = new Map();
    this.told = "";
    this.root = el(
      "article",
      { class: "replica", "aria-label": `Replica ${name}` },
      el("h3", {}, el("span", { class: "name" }, name), " ", this.state),
      this.load,
      this.bars,
    );
  }

  // `at` is the Unix time of these figures. Those of a replica that no longer answers stay, and are said to be old.
  show(replica, rates, at) {
    say(this.state, replica.answers ? replica.state : `${replica.state}, does not answer`);
    this.state.dataset.is = replica.answers ? replica.state : "silent";
    this.root.dataset.old = !replica.answers;
    if (!replica.answers) {
      say(this.load, this.pools.size ? `As it was ${this.told}` : "");
      return;
    }
    const speed = rates ? `, ${count(Math.round(rates.generated))} tokens/s` : "";
    const load = `${count(replica.running)} running, ${count(replica.waiting)} waiting`;
    say(this.load, `${load}, ${plural(replica.sessions, "session")}${speed}`);
    this.told = `at ${time(at)}: ${load}, ${plural(replica.sessions, "session")}`;
    for (const [pool, pages] of Object.entries(replica.pools)) {
      if (!this.pools.has(pool)) {
        const bar = new PoolBar(pool);
        this.pools.set(pool, bar);
        this.bars.append(bar.root);
      }
      this.pools.get(pool).show(pages, pool === "full" ? replica.page_bytes : replica.window_page_bytes);
    }
    for (const tier of ["host", "disk"]) {
      if (!replica[tier].budget_bytes) continue;
      if (!this.tiers.has(tier)) {
        const bar = new TierBar(tier);
        this.tiers.set(tier, bar);
        this.bars.append(bar.root);
      }
      this.tiers.get(tier).show(replica[tier]);
    }
  }
}

class PoolBar {
  constructor(pool) {
    this.pool = pool;
    this.figures = el("span", { class: "figures" });
    this.parts = ACCOUNTS.map(([account]) => el("i", { class: `part ${account}` }));
    this.bar = el("div", { class: "bar", role: "img" }, ...this.parts);
    this.root = el(
      "div",
      { class: "pool", "data-pool": pool },
      el("p", { class: "label" }, pool === "full" ? "device" : `device, ${pool}`, " ", this.figures),
      this.bar,
    );
  }

  show(pages, pageBytes) {
    const told = ACCOUNTS.map(([account, name]) => `${count(pages[account])} ${name}`);
    ACCOUNTS.forEach(([account, name], index) => {
      const part = this.parts[index];
      part.style.flexGrow = Math.max(0, pages[account]);
      part.hidden = pages[account] <= 0;
      part.title = `${count(pages[account])} ${name} of ${count(pages.total)} pages, ${bytes(pages[account] * pageBytes)}`;
      part.dataset.pages = pages[account];
    });
    const used = pages.total - pages.free - pages.cached;
    say(
      this.figures,
      `${count(used)} of ${count(pages.total)} pages held (${share(used, pages.total)}), ${count(pages.cached)} cached`,
    );
    this.bar.setAttribute("aria-label", `${this.pool} pool, ${count(pages.total)} pages: ${told.join(", ")}`);
    this.root.dataset.leaked = pages.leaked !== 0;
  }
}

class TierBar {
  constructor(tier) {
    this.tier = tier;
    this.figures = el("span", { class: "figures" });
    this.part = el("i", { class: "part session" });
    this.rest = el("i", { class: "part free" });
    this.bar = el("div", { class: "bar thin", role: "img" }, this.part, this.rest);
    this.root = el("div", { class: "pool" }, el("p", { class: "label" }, tier, " ", this.figures), this.bar);
  }

  show({ used_bytes: used, budget_bytes: budget, sessions }) {
    this.part.style.flexGrow = used;
    this.part.hidden = !used;
    this.rest.style.flexGrow = Math.max(0, budget - used);
    const told = `${bytes(used)} of ${bytes(budget)}, ${plural(sessions, "session")}`;
    say(this.figures, told);
    this.bar.setAttribute("aria-label", `${this.tier}: ${told}`);
  }
}

function alarm(replicas) {
  const leaks = replicas.flatMap((replica) =>
    Object.entries(replica.pools)
      .filter(([, pages]) => pages.leaked !== 0)
      .map(([pool, { leaked }]) => {
        const wrong = leaked > 0 ? "LEAKED" : "DOUBLY ACCOUNTED";
        return `${wrong}: ${plural(Math.abs(leaked), "page")} of pool ${pool} at replica ${replica.replica}`;
      }),
  );
  byId("alarm").hidden = !leaks.length;
  const told = leaks.length ? `${leaks.join("; ")}. The events say which, and who had them last.` : "";
  say(byId("alarm"), told);
}
