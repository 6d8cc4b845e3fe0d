// Calls to the server that the page came from: with the key, errors as exceptions, streams of server-sent events.

const KEY = "kedge-console-key";

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }

  // A key is missing, wrong, or no operator's.
  get wantsKey() {
    return this.status === 401 || this.code === "operator_only";
  }
}

export class Api {
  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(key) {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  }

  // Gives the response, or throws an ApiError. `tenant` is whose session it is about.
  async call(method, path, { body, tenant, session, signal, query } = {}) {
    const url = new URL(path, document.baseURI);
    for (const [name, value] of Object.entries(query ?? {})) url.searchParams.set(name, value);
    const headers = new Headers();
    if (this.key) headers.set("authorization", `Bearer ${this.key}`);
    if (tenant) headers.set("x-tenant-id", tenant);
    if (session) {
      headers.set("x-session-id", session);
      headers.set("x-session-mode", "append");
    }
    if (body !== undefined) headers.set("content-type", "application/json");
    const reply = await fetch(url, {
      method,
      headers,
      signal,
      cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    if (!reply.ok) throw await errorOf(reply);
    return reply;
  }

  async json(method, path, options) {
    return (await this.call(method, path, options)).json();
  }

  // The events of a stream, as {name, data}, where data is text.
  async *events(method, path, options) {
    const reply = await this.call(method, path, options);
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let unread = "";
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        const blocks = (unread + value).split("\n\n");
        unread = blocks.pop();
        for (const block of blocks) {
          const event = eventOf(block);
          if (event.data !== null) yield event;
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }
}

export const sessionPath = (id, action = "") => `v1/kedge/sessions/${encodeURIComponent(id)}${action}`;

function eventOf(block) {
  const event = { name: "message", data: null };
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event.name = line.slice(7);
    if (line.startsWith("data: ")) event.data = line.slice(6);
  }
  return event;
}

async function errorOf(reply) {
  const text = await reply.text();
  try {
    const { error } = JSON.parse(text);
    return new ApiError(reply.status, error.code, error.message);
  } catch {
    return new ApiError(reply.status, "", text.slice(0, 200) || `status ${reply.status}`);
  }
}
