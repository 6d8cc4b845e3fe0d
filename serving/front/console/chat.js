// Turns of a session, streamed, and what each has done: tokens computed and found, time, pages of KV before and after.

import { byId, count, el, plural, say, share, span } from "./dom.js";

const SETTLE_MS = 15000;

export class Chat {
  // `rowOf` gives the newest row of a session, `nextState` a promise of the next state.
  constructor(api, { rowOf, nextState, wantsKey }) {
    this.api = api;
    this.rowOf = rowOf;
    this.nextState = nextState;
    this.wantsKey = wantsKey;
    this.stopping = null;
    this.session = byId("chat-session");
    this.tenant = byId("chat-tenant");
    this.text = byId("chat-text");
    this.talk = byId("talk");
    this.said = byId("chat-said");
    byId("chat").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("chat").requestSubmit();
    });
    byId("chat-stop").addEventListener("click", () => this.stopping?.abort());
    byId("chat-new").addEventListener("click", () => this.begin(newId(), ""));
    this.begin(newId(), "");
  }

  begin(session, tenant) {
    this.session.value = session;
    this.tenant.value = tenant;
    this.talk.replaceChildren();
    say(this.said, "");
  }

  async send() {
    if (this.stopping) return;
    const [session, tenant, text] = [this.session.value, this.tenant.value, this.text.value];
    const answer = el("span", { dir: "auto" });
    const effect = el("dl", { class: "effect", "aria-label": "Effect of the turn" });
    this.talk.append(
      el("div", { class: "message user" }, el("b", {}, "user"), " ", el("span", { dir: "auto" }, text)),
      el("div", { class: "message assistant" }, el("b", {}, "assistant"), " ", answer),
      effect,
    );
    this.scroll();
    this.text.value = "";
    this.busy(new AbortController());
    const turn = new Turn(session, tenant, this.rowOf(session, tenant));
    // Meanwhile the talk may be another one.
    const tell = (said) => effect.isConnected && say(this.said, said);
    try {
      await this.stream(turn, text, answer, tell);
      tell(turn.isCutOff ? "The answer was cut off: it may have no more tokens." : "The answer is complete.");
    } catch (error) {
      if (error.wantsKey) this.wantsKey(error);
      turn.failure = error.name === "AbortError" ? "Stopped: the turn leaves no trace." : error.message;
      tell(turn.failure);
      if (effect.isConnected) this.text.value ||= text;
    } finally {
      this.busy(null);
    }
    this.follow(() => turn.show(effect));
    if (turn.failure === null && turn.usage) {
      await this.settled(turn);
      this.follow(() => turn.show(effect));
    }
  }

  async stream(turn, text, answer, tell) {
    const body = {
      messages: [{ role: "user", content: text }],
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: Number(byId("chat-tokens").value) || 200,
    };
    const { session, tenant } = turn;
    const options = { body, session, tenant, signal: this.stopping.signal };
    tell("Waiting for the first token.");
    // Each drawing lays out the whole answer: pieces that come between two frames are drawn together.
    let unseen = "";
    const draw = () => {
      this.follow(() => answer.append(unseen));
      unseen = "";
    };
    try {
      for await (const { data } of this.api.events("POST", "v1/chat/completions", options)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        if (chunk.usage) turn.usage = chunk.usage;
        const { delta = {}, finish_reason: reason = null } = chunk.choices?.[0] ?? {};
        turn.finish = reason ?? turn.finish;
        const piece = (delta.reasoning_content ?? "") + (delta.content ?? "");
        if (piece) {
          if (turn.firstS === null) tell("Answering.");
          turn.firstS ??= turn.passedS();
          if (!unseen) requestAnimationFrame(draw);
          unseen += piece;
        }
      }
    } finally {
      draw();
    }
    if (turn.finish === null) throw new Error("The stream ended before the answer did.");
    turn.endS = turn.passedS();
  }

  // Owners tell of their sessions once a second: waits until the session's row has this turn.
  async settled(turn) {
    const until = performance.now() + SETTLE_MS;
    for (;;) {
      const row = this.rowOf(turn.session, turn.tenant);
      const committed = turn.usage.prompt_tokens + turn.usage.completion_tokens;
      if (row && !row.in_turn && row.kv_pages !== null && row.tokens >= committed && row.tier !== "log") {
        turn.after = row;
        return;
      }
      if (performance.now() > until) return;
      await this.nextState();
    }
  }

  busy(stopping) {
    this.stopping = stopping;
    byId("chat-send").disabled = stopping !== null;
    byId("chat-stop").disabled = stopping === null;
  }

  // Adds to the talk. Whoever reads its end goes on to see the end; whoever has scrolled up stays there.
  follow(add) {
    const { scrollHeight, scrollTop, clientHeight } = this.talk;
    add();
    if (scrollHeight - scrollTop - clientHeight < 40) this.scroll();
  }

  scroll() {
    this.talk.scrollTop = this.talk.scrollHeight;
  }
}

class Turn {
  constructor(session, tenant, before) {
    this.session = session;
    this.tenant = tenant;
    this.before = before ?? null;
    this.after = null;
    this.usage = null;
    this.finish = null;
    this.failure = null;
    this.startMs = performance.now();
    this.firstS = null;
    this.endS = null;
  }

  get isCutOff() {
    return this.finish === "length";
  }

  passedS() {
    return (performance.now() - this.startMs) / 1000;
  }

  show(list) {
    list.replaceChildren(
      ...this.facts().map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
    );
  }

  facts() {
    if (this.failure !== null) return [["failed", this.failure]];
    const facts = [];
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: output } = this.usage;
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      facts.push(["prompt", plural(prompt, "token")]);
      facts.push(["cached", `${count(cached)} (${share(cached, prompt)})`]);
      facts.push(["answer", plural(output, "token") + (this.isCutOff ? ", cut off" : "")]);
    }
    if (this.firstS !== null) facts.push(["first token", span(this.firstS)]);
    if (this.endS !== null) facts.push(["in all", span(this.endS)]);
    if (this.usage) {
      const pages = (row) => (row && row.kv_pages !== null ? count(row.kv_pages) : "–");
      const before = this.before === null ? "0" : pages(this.before);
      facts.push(["KV pages", `${before} → ${this.after ? pages(this.after) : "…"}`]);
      if (this.after) facts.push(["at", `${this.after.replica_id}, ${this.after.tier}, epoch ${this.after.epoch}`]);
    }
    return facts;
  }
}

function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(3));
  return `console-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
