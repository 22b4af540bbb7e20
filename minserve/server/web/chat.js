// The conversation: what was said, the answer under way, and the parameters that it is asked with.

import { byId, element } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

/** What the form says: the system prompt, and fields of a request. Throws SyntaxError for tools that are no JSON list. */
function parameters() {
  const form = new FormData(byId("parameter-form"));
  const fields = {};
  for (const name of NUMBERS) {
    if (form.get(name) !== "") fields[name] = Number(form.get(name));
  }
  const stop = form.get("stop").split(/\r?\n/).filter((line) => line !== "");
  if (stop.length) fields.stop = stop;
  if (form.get("tools").trim()) {
    fields.tools = JSON.parse(form.get("tools"));
    if (!Array.isArray(fields.tools)) throw new SyntaxError("this is no list");
  }
  return { system: form.get("system"), fields };
}

/** Changes the log and stays at its end if that was in view. */
function keepingBottom(change) {
  const log = byId("log");
  const atBottom = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atBottom) log.scrollTop = log.scrollHeight;
}

/** The view of one message; an assistant's grows, a frame at a time. */
class MessageView {
  #grown = new Map(); // node to the text that it is still to get

  constructor(role, title) {
    this.node = element("article", { class: `message ${role}` }, element("h3", {}, title));
    this.calls = [];
    this.texts = {};
    keepingBottom(() => byId("log").append(this.node));
  }

  text(part) {
    return this.texts[part]?.textContent ?? "";
  }

  /** Text that belongs to `part`: content, or reasoning, which has a fold of its own. */
  add(part, text) {
    this.texts[part] ??= part === "reasoning" ? this.#fold(part, "Reasoning", "div") : this.#put(element("div", { class: "text" }));
    this.#grow(this.texts[part], text);
  }

  /** A piece of a tool call, as streams tell it. */
  addCall({ index, id, function: piece = {} }) {
    this.calls[index] ??= { id, name: piece.name, code: this.#fold("call", `Call of ${piece.name}`, "pre") };
    this.#grow(this.calls[index].code, piece.arguments ?? "");
  }

  meta(text, isFault = false) {
    this.flush();
    this.#put(element("p", { class: isFault ? "meta fault" : "meta", role: isFault ? "alert" : null }, text));
  }

  #put(node) {
    keepingBottom(() => this.node.append(node));
    return node;
  }

  #fold(kind, title, tag) {
    const inside = element(tag, { class: "text" });
    this.#put(element("details", { class: kind }, element("summary", {}, title), inside));
    return inside;
  }

  #grow(node, text) {
    if (this.#grown.size === 0) requestAnimationFrame(() => this.flush());
    this.#grown.set(node, (this.#grown.get(node) ?? "") + text);
  }

  flush() {
    keepingBottom(() => this.#grown.forEach((text, node) => node.append(text)));
    this.#grown.clear();
  }
}

/** What came of an answer, in one line. Times in milliseconds. */
function summary({ began, first, finish, usage }) {
  const seconds = (performance.now() - first) / 1000;
  const count = usage?.completion_tokens ?? 0;
  const thought = usage?.completion_tokens_details?.reasoning_tokens;
  const words = [`${count} ${count === 1 ? "token" : "tokens"}`];
  if (thought) words.push(`${thought} of them reasoning`);
  if (first) words.push(`first after ${((first - began) / 1000).toFixed(2)} s`);
  if (first && count > 1) words.push(`then ${Math.round((count - 1) / Math.max(1e-3, seconds)).toLocaleString("en")} a second`);
  if (finish === "length") words.push("cut off at its most tokens");
  return words.join(" · ");
}

export class Chat {
  #server;
  #history = []; // messages as the API takes them
  #views = [];
  #running = null; // AbortController of the answer under way

  constructor(server) {
    this.#server = server;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#submit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#running) this.#stop();
    });
    byId("stop").addEventListener("click", () => this.#stop());
    byId("again").addEventListener("click", () => this.#tryAgain());
    byId("clear").addEventListener("click", () => this.#clear());
    byId("parameter-form").addEventListener("submit", (event) => event.preventDefault());
    byId("parameters").open = matchMedia("(min-width: 861px)").matches;
  }

  #submit() {
    const text = byId("prompt").value;
    if (this.#running || !text.trim()) return;
    byId("prompt").value = "";
    byId("log").querySelectorAll("button").forEach((button) => button.remove()); // results come too late now
    this.#history.push({ role: "user", content: text });
    this.#show("user", "You").add("content", text);
    byId("log").scrollTop = byId("log").scrollHeight;
    this.#answer();
  }

  #stop() {
    this.#running?.abort();
    byId("prompt").focus();
  }

  #show(role, title) {
    byId("greeting").hidden = true;
    this.#views.push(new MessageView(role, title));
    return this.#views.at(-1);
  }

  #showState() {
    const busy = this.#running !== null;
    const idle = !busy && this.#views.length > 0;
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    byId("clear").hidden = byId("again").hidden = !idle;
  }

  /** Streams an answer to the history. */
  async #answer() {
    let asked;
    byId("tools-fault").textContent = "";
    try {
      asked = parameters();
    } catch (fault) {
      byId("parameters").open = true;
      byId("tools-fault").textContent = `Tools cannot be read: ${fault.message}`;
      this.#showState();
      return;
    }
    this.#running = new AbortController();
    this.#showState();
    const told = { began: performance.now(), first: 0, finish: null, usage: null };
    const view = this.#show("assistant", "Model");
    view.node.setAttribute("aria-busy", "true"); // read out once it is whole
    const system = asked.system.trim() ? [{ role: "system", content: asked.system }] : [];
    const body = { ...asked.fields, messages: [...system, ...this.#history], stream: true, stream_options: { include_usage: true } };
    try {
      for await (const event of this.#server.events("v1/chat/completions", { body, signal: this.#running.signal })) {
        this.#receive(event, view, told);
      }
      view.meta(summary(told));
    } catch (fault) {
      const stopped = fault.name === "AbortError";
      view.meta(stopped ? "Stopped" : fault.message, !stopped);
    }
    view.node.removeAttribute("aria-busy");
    this.#running = null;
    this.#remember(view, told.finish);
    this.#showState();
  }

  #receive(event, view, told) {
    told.usage = event.usage ?? told.usage;
    const choice = event.choices[0];
    if (!choice) return;
    const { reasoning_content: reasoning, content, tool_calls: calls = [] } = choice.delta;
    if (!told.first && (reasoning || content || calls.length)) told.first = performance.now();
    if (reasoning) view.add("reasoning", reasoning);
    if (content) view.add("content", content);
    calls.forEach((piece) => view.addCall(piece));
    told.finish = choice.finish_reason ?? told.finish;
  }

  /** Takes what was answered into the history; whole tool calls then wait for their results. */
  #remember(view, finish) {
    const said = { role: "assistant", content: view.text("content") };
    if (view.text("reasoning")) said.reasoning_content = view.text("reasoning");
    const calls = ["tool_calls", "stop"].includes(finish) ? view.calls : []; // else they may be cut off
    if (calls.length) {
      said.tool_calls = calls.map(({ id, name, code }) => ({ id, type: "function", function: { name, arguments: code.textContent } }));
      this.#offerResults(view);
    }
    if (said.content || calls.length) this.#history.push(said);
  }

  /** A field for each call's result, and a button that goes on with them. */
  #offerResults(view) {
    const fields = view.calls.map((call) => {
      const field = element("textarea", { rows: 2, class: "code" });
      call.code.after(element("label", {}, `Result of ${call.name}`, field));
      return field;
    });
    const button = element("button", { type: "button", class: "quiet" }, "Send results");
    button.addEventListener("click", () => {
      if (this.#running || this.#views.at(-1) !== view) return;
      view.calls.forEach(({ id }, place) => this.#history.push({ role: "tool", tool_call_id: id, content: fields[place].value }));
      button.remove();
      byId("log").focus(); // not lost with the button
      this.#answer();
    });
    keepingBottom(() => view.node.append(button));
  }

  /** Drops the last answer and asks for it once more. */
  #tryAgain() {
    if (this.#history.at(-1)?.role === "assistant") this.#history.pop();
    if (this.#views.at(-1)?.node.classList.contains("assistant")) this.#views.pop().node.remove();
    byId("log").focus(); // not lost with the button
    this.#answer();
  }

  #clear() {
    this.#history = [];
    this.#views.splice(0).forEach(({ node }) => node.remove());
    byId("greeting").hidden = false;
    this.#showState();
    byId("prompt").focus();
  }
}
