// The console: one stream of events from the server, and the parts of the page that show it.

import { Api, ApiError } from "./api.js";
import { Chat } from "./chat.js";
import { byId, count, plural, say, share } from "./dom.js";
import { Events } from "./events.js";
import { History } from "./history.js";
import { Memory } from "./memory.js";
import { keyOf, Sessions } from "./sessions.js";

const WATCH = "v1/kedge/watch";
const MOST_SESSIONS = 500;
const RETRY_MS = [500, 1000, 2000, 5000];
const SILENCE_MS = 15000;

class Console {
  constructor() {
    this.api = new Api();
    this.waiting = [];
    this.watching = null;
    this.memory = new Memory();
    this.sessions = new Sessions((row) => this.choose(row));
    this.events = new Events((id, tenant, rid) => this.chooseById(id, tenant, rid));
    const wantsKey = (error) => this.askKey(error.message);
    this.history = new History(this.api, {
      chat: (row) => this.chatIn(row.session_id, row.tenant),
      forked: (id, tenant) => this.chat.begin(id, tenant),
      closed: () => this.sessions.leave(),
      wantsKey,
    });
    this.chat = new Chat(this.api, {
      rowOf: (id, tenant) => this.rowOf(id, tenant),
      nextState: () => new Promise((resolve) => this.waiting.push(resolve)),
      wantsKey,
    });
    byId("key-button").addEventListener("click", () => this.askKey("Calls are made with this key."));
    byId("key-dialog").addEventListener("close", () => this.keyGiven());
    document.addEventListener("visibilitychange", () => document.hidden && this.watching?.abort());
  }

  // Watches for ever: a stream that ends is opened again, later and later where nothing comes of it.
  async run() {
    for (let tries = 0; ; tries += 1) {
      await this.seen();
      const began = performance.now();
      try {
        await this.watch();
        this.linkIs("waiting", "connecting again");
      } catch (error) {
        if (!document.hidden) {
          this.linkIs("down", whyNot(error));
          if (error.wantsKey) await this.keyAsked(error.message);
        }
      }
      if (document.hidden || performance.now() - began > 10000) tries = 0;
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]));
    }
  }

  // A browser has six connections to a server for all its tabs together: a tab that is not seen leaves them to others.
  async seen() {
    while (document.hidden) {
      this.linkIs("waiting", "paused while not seen");
      await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    }
  }

  async watch() {
    this.watching = new AbortController();
    let first = true;
    const options = { signal: this.watching.signal, query: { interval_s: 1, limit: MOST_SESSIONS } };
    const stream = this.api.events("GET", WATCH, options);
    const beganS = Date.now() / 1000;
    // A connection may die without a word. A state comes every second, so silence means that.
    let silence = this.abortAfter(SILENCE_MS);
    try {
      for await (const { name, data } of stream) {
        clearTimeout(silence);
        silence = this.abortAfter(SILENCE_MS);
        if (first) {
          this.events.clear();
          this.linkIs("up", "live");
          first = false;
        }
        const told = JSON.parse(data);
        if (name === "state") this.show(told);
        if (name === "event") this.events.add(told, told.at > beganS - 1);
        if (name === "error") throw new ApiError(0, told.error.code, told.error.message);
      }
    } finally {
      clearTimeout(silence);
    }
  }

  abortAfter(ms) {
    const watching = this.watching;
    return setTimeout(() => watching.abort(), ms);
  }

  show(state) {
    say(byId("model"), state.model);
    this.linkIs(state.trouble ? "waiting" : "up", state.trouble ?? "live");
    this.memory.show(state);
    this.sessions.show(state.sessions);
    this.summarize(state);
    const shown = this.history.row;
    if (shown !== null) {
      const row = this.sessions.find(keyOf(shown));
      if (row) this.history.show(row);
      else this.history.gone();
    }
    const waiting = this.waiting;
    this.waiting = [];
    for (const resolve of waiting) resolve();
  }

  summarize(state) {
    const total = (name) => state.replicas.reduce((sum, each) => sum + (each[name] ?? 0), 0);
    const [prefill, cached] = [total("prefill_tokens"), total("cached_tokens")];
    say(
      byId("summary"),
      `${plural(state.replicas.length, "replica")}, ${plural(state.sessions.total, "session")}, ` +
        `${count(total("running"))} running, ${share(cached, cached + prefill)} of input found in KV`,
    );
  }

  rowOf(id, tenant, rid = null) {
    return this.sessions.rows.find((row) => row.session_id === id && row.tenant === tenant && row.rid === rid);
  }

  choose(row) {
    this.sessions.choose(row);
    this.history.open(row);
  }

  chooseById(id, tenant, rid) {
    const row = this.rowOf(id, tenant, rid);
    byId("events-said").hidden = Boolean(row);
    if (row) this.choose(row);
    else say(byId("events-said"), `Session ${id} has ended, or was not used for long.`);
  }

  chatIn(id, tenant) {
    this.chat.begin(id, tenant);
    byId("chat-text").focus();
  }

  linkIs(kind, text) {
    byId("link").dataset.is = kind;
    document.body.dataset.old = kind === "down";
    say(byId("link"), text);
  }

  askKey(said) {
    const dialog = byId("key-dialog");
    if (dialog.open) return;
    say(byId("key-said"), said);
    byId("key").value = "";
    dialog.returnValue = "";
    dialog.showModal();
  }

  // Asks once, and waits until a key is given: after Escape, the key's button asks again.
  async keyAsked(said) {
    this.askKey(said);
    await new Promise((resolve) => (this.goOn = resolve));
  }

  keyGiven() {
    if (byId("key-dialog").returnValue !== "use") return;
    this.api.key = byId("key").value.trim();
    this.watching?.abort();
    this.goOn?.();
  }
}

// Why nothing comes: what the server says, if it answers at all.
function whyNot(error) {
  if (error.wantsKey) return "a key is needed";
  return error instanceof ApiError ? `not connected: ${error.message}` : "not connected";
}

new Console().run();
