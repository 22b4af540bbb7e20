// Reads Prometheus text, and rates and quantiles from two readings of it. Knows no names of metrics.

/** Samples by name without its prefix: `[{labels, value}]`. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = /^[a-zA-Z_]\w*:(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, key, value]) => [key, value]));
    if (!samples.has(found[1])) samples.set(found[1], []);
    samples.get(found[1]).push({ labels, value: found[3] === "+Inf" ? Infinity : Number(found[3]) });
  }
  return samples;
}

export const total = (samples, name) => (samples.get(name) ?? []).reduce((sum, { value }) => sum + value, 0);

/** Label value to sample, of one label. */
export const byLabel = (samples, name, label) =>
  new Map((samples.get(name) ?? []).map(({ labels, value }) => [labels[label], value]));

/** The quantile of what a histogram counted between two readings, as Prometheus would estimate it; null when nothing came. */
export function quantile(share, before, after, name) {
  const old = byLabel(before, `${name}_bucket`, "le");
  const buckets = [...byLabel(after, `${name}_bucket`, "le")]
    .map(([bound, count]) => ({ bound: bound === "+Inf" ? Infinity : Number(bound), count: count - (old.get(bound) ?? 0) }))
    .sort((one, other) => one.bound - other.bound);
  const wanted = share * (buckets.at(-1)?.count ?? 0);
  if (!(wanted > 0)) return null;
  const place = buckets.findIndex(({ count }) => count >= wanted);
  const lower = place > 0 ? buckets[place - 1] : { bound: 0, count: 0 };
  if (buckets[place].bound === Infinity) return lower.bound;
  return lower.bound + (buckets[place].bound - lower.bound) * (wanted - lower.count) / (buckets[place].count - lower.count);
}
