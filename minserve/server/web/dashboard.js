// The live dashboard: reads /metrics every second and /server_info every few, and draws what changed.

import { byId, element, table } from "./dom.js";
import { HeatMap } from "./heat.js";
import { byLabel, parse, quantile, total } from "./metrics.js";

const READ_EVERY = 1000; // ms
const INFO_EVERY = 5; // readings
const KEPT = 61; // readings
const RATE_OVER = 5; // readings

const count = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
const bytes = (value) => (value >= 1e9 ? `${(value / 1e9).toFixed(1)} GB` : `${(value / 1e6).toFixed(1)} MB`);

function duration(seconds) {
  if (seconds === null) return ["–", ""];
  if (seconds < 1) return [(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0), "ms"];
  return [seconds < 100 ? seconds.toFixed(2) : count(seconds), "s"];
}

/** One number with its unit, a note, and where asked its course. */
class Tile {
  constructor(id, title) {
    this.value = element("span", { id });
    this.unit = element("small");
    this.note = element("div", { class: "note", id: `${id}-note` });
    this.node = element("dl", { class: "tile" }, element("dt", {}, title), element("dd", {}, this.value, this.unit));
    this.node.lastChild.append(this.note);
  }

  show([value, unit], note, isBad = false) {
    this.value.textContent = value;
    this.unit.textContent = unit;
    this.note.textContent = note;
    this.node.classList.toggle("bad", isBad);
  }

  course(values) {
    const svgName = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(svgName, "svg");
    svg.setAttribute("viewBox", `0 0 ${KEPT} 34`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    const top = Math.max(...values, 1e-9);
    const points = values.map((value, place) => `${KEPT - values.length + place} ${(33 - 31 * value / top).toFixed(1)}`);
    for (const [name, way] of [
      ["area", `M${KEPT - values.length} 34L${points.join("L")}L${KEPT - 1} 34Z`], ["line", `M${points.join("L")}`],
    ]) {
      const path = document.createElementNS(svgName, "path");
      path.setAttribute("class", name);
      path.setAttribute("d", way);
      svg.append(path);
    }
    this.node.querySelector("svg")?.remove();
    this.node.append(svg);
  }
}

export class Dashboard {
  #server;
  #readings = []; // {time in s, samples}, the newest last
  #courses = { running: [], rate: [], usage: [], done: [] };
  #tiles = {};
  #heat = new HeatMap();
  #timer = null;
  #turns = 0;

  constructor(server) {
    this.#server = server;
    const titles = {
      running: "Requests running", rate: "Tokens a second", usage: "KV cache in use", done: "Answers",
      ttft: "Time to first token", tpot: "Time per output token", age: "Since the last token", faults: "Logits not finite",
    };
    for (const [name, title] of Object.entries(titles)) {
      this.#tiles[name] = new Tile(`tile-${name}`, title);
      byId("tiles").append(this.#tiles[name].node);
    }
    document.addEventListener("visibilitychange", () => this.#turn());
  }

  /** Reads as long as it is shown. */
  set shown(value) {
    byId("dashboard").hidden = !value;
    this.#turn();
  }

  async #turn() {
    clearTimeout(this.#timer);
    if (byId("dashboard").hidden || document.hidden) return;
    try {
      await this.#read();
      byId("stale").hidden = true;
    } catch (fault) {
      byId("stale").textContent = `Nothing new: ${fault.message}`;
      byId("stale").hidden = false;
    }
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#turn(), READ_EVERY);
  }

  async #read() {
    const samples = parse(await (await this.#server.request("metrics")).text());
    this.#readings.push({ time: performance.now() / 1000, samples });
    if (this.#readings.length > KEPT) this.#readings.shift();
    if (this.#rate("rank_steps_total") < 0) this.#readings.splice(0, this.#readings.length - 1); // another server by now
    this.#showNumbers();
    if (this.#turns++ % INFO_EVERY === 0) this.#showInfo(await (await this.#server.request("server_info")).json(), samples);
  }

  /** The reading that many before the last, or the first. */
  #before(readings) {
    return this.#readings.at(-1 - readings) ?? this.#readings[0];
  }

  #rate(name) {
    const now = this.#readings.at(-1);
    const before = this.#before(RATE_OVER);
    const seconds = now.time - before.time;
    return seconds > 0 ? (total(now.samples, name) - total(before.samples, name)) / seconds : 0;
  }

  #quantiles(name) {
    const [before, now] = [this.#readings[0].samples, this.#readings.at(-1).samples];
    return [quantile(0.5, before, now, name), quantile(0.95, before, now, name)];
  }

  #showNumbers() {
    const { samples } = this.#readings.at(-1);
    const tiles = this.#tiles;
    const running = total(samples, "num_requests_running");
    const rate = this.#rate("generation_tokens_total");
    const usage = total(samples, "kv_cache_usage_perc");
    tiles.running.show([count(running), ""], `${count(total(samples, "num_requests_waiting"))} waiting`);
    tiles.rate.show([count(rate), ""], `prompts: ${count(this.#rate("prompt_tokens_total"))} a second`);
    for (const [tile, name] of [[tiles.ttft, "time_to_first_token_seconds"], [tiles.tpot, "inter_token_latency_seconds"]]) {
      const [median, slow] = this.#quantiles(name);
      tile.show(duration(median), slow === null ? "none in the last minute" : `95 of 100 within ${duration(slow).join(" ")}`);
    }
    const [queries, hits] = [total(samples, "prefix_cache_queries_total"), total(samples, "prefix_cache_hits_total")];
    tiles.usage.show([percent(usage), ""], `prefix cache: ${queries ? percent(hits / queries) : "nothing"} found`, usage > 0.95);
    const ended = byLabel(samples, "request_success_total", "finished_reason");
    const aborts = total(samples, "aborts_total");
    const done = this.#rate("request_success_total");
    const cut = count(ended.get("length") ?? 0);
    tiles.done.show([count(total(samples, "request_success_total")), ""], `${cut} cut by length, ${count(aborts)} aborted`);
    const age = total(samples, "last_decode_age_seconds");
    tiles.age.show(duration(age), running ? "" : "idle", running > 0 && age > 10);
    const rows = total(samples, "nan_rows_total");
    tiles.faults.show([count(rows), "rows"], `${count(total(samples, "num_preemptions_total"))} preemptions`, rows > 0);
    for (const [name, value] of Object.entries({ running, rate, usage, done })) {
      this.#courses[name].push(value);
      if (this.#courses[name].length > KEPT) this.#courses[name].shift();
      tiles[name].course(this.#courses[name]);
    }
    this.#showSteps(samples);
  }

  #showSteps(samples) {
    const replays = [...byLabel(samples, "graph_replay_total", "bs")].sort(([one], [other]) => one - other)
      .map(([size, steps]) => ["replay", `Graph of ${size}`, steps]);
    const eager = [...byLabel(samples, "eager_decode_steps_total", "reason")].map(([why, steps]) => ["eager", `Eager: ${why}`, steps]);
    const rows = [...replays, ...eager, ["mixed", "With prompts", total(samples, "mixed_steps_total")]];
    const most = Math.max(...rows.map(([, , steps]) => steps), 1);
    const made = table("Steps by kind", ["Kind", "Steps", "Share"], rows.map(([, name, steps]) => {
      const bar = element("div");
      bar.style.width = `${100 * steps / most}%`;
      return [name, count(steps), bar];
    }), "bars");
    made.querySelectorAll("tbody tr").forEach((row, place) => {
      row.className = rows[place][0];
      row.lastChild.className = "bar";
    });
    byId("steps").replaceChildren(made);
  }

  #showInfo({ ranks, served, context_length: context }, samples) {
    this.#showStart(ranks);
    this.#showRanks(ranks, samples);
    this.#heat.show(ranks.map((rank) => rank.now.expert_load ?? {}));
    const effective = { model: served.join(", "), context, ...ranks[0].info.effective };
    const rows = Object.entries(effective).map(([name, value]) => [name, String(value)]);
    byId("settings").replaceChildren(table("Effective settings", ["Setting", "Value"], rows, "settings"));
  }

  #showStart(ranks) {
    const phases = Object.entries(ranks[0].startup_seconds);
    const whole = phases.reduce((sum, [, seconds]) => sum + seconds, 0);
    byId("timeline").replaceChildren(...phases.map(([name, seconds]) => {
      const part = element("div", { title: `${name}: ${seconds.toFixed(2)} s` });
      part.style.flexGrow = seconds / whole;
      return part;
    }));
    const rows = [...phases.map(([name, seconds]) => [name, `${seconds.toFixed(2)} s`]), ["all", `${whole.toFixed(2)} s`]];
    byId("phases").replaceChildren(table("Seconds of the start by phase", ["Phase", "Took"], rows));
    const verdicts = ranks.map(({ info }) => info.self_check?.verdict ?? "none");
    byId("verdict").textContent = [...new Set(verdicts)].join("; ");
    byId("verdict").className = verdicts.every((verdict) => verdict.startsWith("passed")) ? "good" : "";
  }

  #showRanks(ranks, samples) {
    const of = (name, rank) => byLabel(samples, `rank_${name}`, "rank").get(String(rank)) ?? 0;
    const rows = ranks.map(({ rank, info, now }) => [
      `${rank}`, count(of("num_requests_running", rank)), count(of("num_requests_waiting", rank)),
      percent(of("kv_cache_usage_perc", rank)), count(of("steps_total", rank)), count(of("dummy_steps_total", rank)),
      info.memory ? bytes(info.memory.weights_bytes) : "–", info.memory ? bytes(info.memory.kv_cache_bytes) : "–",
      now.device_memory ? bytes(now.device_memory.free_bytes) : "–",
    ]);
    const titles = ["Rank", "Running", "Waiting", "KV in use", "Steps", "Dummy steps", "Weights", "KV cache", "Device free"];
    byId("ranks").replaceChildren(table("Ranks", titles, rows));
  }
}
