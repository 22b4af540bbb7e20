// Starts the page: which view is shown, and how the server is.

import { Chat } from "./chat.js";
import { Dashboard } from "./dashboard.js";
import { byId } from "./dom.js";
import { Server } from "./server.js";

const server = new Server();
const dashboard = new Dashboard(server);
new Chat(server);

function showView() {
  const view = { "": "chat", "#chat": "chat", "#dashboard": "dashboard" }[location.hash];
  if (!view) return; // a place inside the view
  byId("chat").hidden = view !== "chat";
  dashboard.shown = view === "dashboard";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  window.scrollTo(0, 0);
}

/** Tells the state of the server in the header, for as long as the page lives. */
async function watch() {
  let [state, words] = ["ready", ""];
  try {
    await server.request("ready");
    const { data } = await (await server.request("v1/models")).json();
    words = data[0].id;
  } catch (fault) {
    [state, words] = fault.status === 503 ? ["waiting", fault.message] : ["gone", fault.status ? fault.message : "no answer from the server"];
  }
  if (byId("status").textContent !== words) byId("status").textContent = words;
  byId("status").dataset.state = state;
  byId("send").disabled = state !== "ready";
  setTimeout(watch, state === "ready" ? 5000 : 1000);
}

window.addEventListener("hashchange", showView);
showView();
watch();
