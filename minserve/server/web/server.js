// Talks to the server that this page came from: keys, JSON, streams of events. Knows nothing of what is shown.

import { byId } from "./dom.js";

const STORED_KEY = "minserve-key";

export class ServerFault extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The keys and requests of one page. */
export class Server {
  #asking = null;

  /** The key that the user types; one dialog at a time, however many requests wait for it. */
  #askForKey(fault) {
    this.#asking ??= new Promise((resolve) => {
      const dialog = byId("key-dialog");
      byId("key-fault").textContent = fault;
      const refuse = (event) => event.preventDefault(); // without a key there is nothing to show
      dialog.addEventListener("cancel", refuse);
      dialog.addEventListener("close", () => {
        dialog.removeEventListener("cancel", refuse);
        sessionStorage.setItem(STORED_KEY, byId("key").value);
        byId("key").value = "";
        this.#asking = null;
        resolve();
      }, { once: true });
      dialog.showModal();
    });
    return this.#asking;
  }

  /** A response that is not an error. Throws ServerFault with the server's words; asks for a key as often as it takes. */
  async request(path, { body, signal } = {}) {
    for (;;) {
      const key = sessionStorage.getItem(STORED_KEY);
      const headers = key ? { Authorization: `Bearer ${key}` } : {};
      if (body) headers["Content-Type"] = "application/json";
      const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
      if (response.ok) return response;
      const fault = await response.json().catch(() => ({}));
      const message = fault.error?.message ?? `The server answered ${response.status}`;
      if (response.status !== 401) throw new ServerFault(message, response.status);
      if (sessionStorage.getItem(STORED_KEY) === key) await this.#askForKey(key ? message : "");
    }
  }

  /** The events of a stream, parsed; ends at [DONE]. Throws ServerFault when the stream tells of an error or ends too early. */
  async* events(path, options) {
    const response = await this.request(path, options);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ServerFault("The answer was cut off", 0);
      text += value;
      const whole = text.split("\n\n");
      text = whole.pop();
      for (const event of whole) {
        const data = event.replace(/^data: ?/, "");
        if (data === "[DONE]") return;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new ServerFault(parsed.error.message, 0);
        yield parsed;
      }
    }
  }
}
