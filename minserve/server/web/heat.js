// The heat map of expert load: one row a layer, one column an expert, each cell against its layer's mean.

import { byId, table } from "./dom.js";

const HOTTEST = 4; // times the mean: the end of the scale

/** `#rrggbb` as three numbers. */
const channels = (colour) => [1, 3, 5].map((place) => parseInt(colour.slice(place, place + 2), 16));

export class HeatMap {
  #layers = []; // {layer, counts, mean}

  constructor() {
    byId("heat").addEventListener("pointermove", (event) => this.#point(event));
    byId("heat").addEventListener("pointerleave", () => { byId("heat-cell").textContent = ""; });
  }

  /** `loads`: of each rank, layer to one count an expert of the model, the pairs of (token, expert) that the rank computed. */
  show(loads) {
    const names = [...new Set(loads.flatMap(Object.keys))].sort((one, other) => one - other);
    this.#layers = names.map((layer) => {
      const ofRanks = loads.map((load) => load[layer] ?? []);
      const counts = Array.from({ length: Math.max(...ofRanks.map((own) => own.length)) }, (_, expert) =>
        ofRanks.reduce((sum, own) => sum + (own[expert] ?? 0), 0));
      return { layer, counts, mean: counts.reduce((sum, count) => sum + count, 0) / counts.length };
    });
    const known = this.#layers.some(({ mean }) => mean > 0);
    byId("heat").hidden = byId("load-details").hidden = !known;
    byId("load-hint").textContent = known
      ? `One row a layer, one column an expert; the stronger the colour, the more tokens, up to ${HOTTEST} times the layer's mean.`
      : "Nothing is counted yet; a GPU that has all experts does not count.";
    if (!known) return;
    this.#draw();
    const rows = this.#layers.map(({ layer, counts, mean }) => {
      const hottest = Math.max(...counts);
      return [layer, String(counts.indexOf(hottest)), (hottest / mean).toFixed(2), String(counts.filter((count) => count === 0).length)];
    });
    byId("load-table").replaceChildren(
      table("Expert load by layer", ["Layer", "Hottest expert", "Times the mean", "Experts without a token"], rows));
  }

  #draw() {
    const canvas = byId("heat");
    const style = getComputedStyle(document.documentElement);
    const [cold, hot] = ["--ground", "--accent"].map((name) => channels(style.getPropertyValue(name).trim()));
    canvas.width = Math.max(...this.#layers.map(({ counts }) => counts.length));
    canvas.height = this.#layers.length;
    canvas.style.height = `${this.#layers.length * Math.max(5, Math.min(22, 300 / this.#layers.length))}px`;
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    this.#layers.forEach(({ counts, mean }, row) => counts.forEach((count, column) => {
      const heat = mean > 0 ? Math.min(1, count / mean / HOTTEST) : 0;
      const colour = cold.map((channel, place) => channel + heat * (hot[place] - channel));
      image.data.set([...colour, 255], 4 * (row * canvas.width + column));
    }));
    context.putImageData(image, 0, 0);
  }

  #point({ offsetX, offsetY }) {
    const canvas = byId("heat");
    const row = this.#layers[Math.floor(offsetY / canvas.clientHeight * canvas.height)];
    const expert = Math.floor(offsetX / canvas.clientWidth * canvas.width);
    if (row?.counts[expert] === undefined) return;
    const pairs = row.counts[expert];
    byId("heat-cell").textContent = `Layer ${row.layer}, expert ${expert}: ${pairs} tokens, ${(pairs / row.mean).toFixed(2)} times the mean`;
  }
}
