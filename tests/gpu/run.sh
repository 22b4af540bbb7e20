#!/usr/bin/env bash
# Kernel tests and the kernel bench on a GPU machine, from the repository root: tests/gpu/run.sh [LOG_DIRECTORY]
# Tests and the bench's compilation run side by side, then the bench alone. Every part's log is kept; tables come last.
set -uo pipefail
out=${1:-/tmp/minserve-gpu-tests}; mkdir -p "$out"
export OMP_NUM_THREADS=1
start=$SECONDS
python3 -m pytest tests/gpu -n "${TEST_PROCESSES:-10}" --confcutdir=tests/gpu -p no:cacheprovider --tb=short --durations=8 \
  >"$out/tests.log" 2>&1 & tests=$!
pids=()
for cases in "attention" "linear" "rows" "qwen3-30b bf16 x8" "qwen3-30b bf16 x32" "qwen3-30b bf16 x128" "qwen3-30b fp8 x8" "qwen3-30b fp8 x32" \
  "qwen3-30b fp8 x128" "moonlight bf16 x8" "moonlight bf16 x32" "moonlight bf16 x128" "deepseek-v3 fp8"; do
  python3 -m minserve.kernels.bench --warm --only "$cases" >"$out/warm-${cases// /-}.log" 2>&1 & pids+=($!)
done
wait "${pids[@]}"; echo "compiled after $((SECONDS - start)) s"
wait "$tests"; status=$?; echo "tests ended after $((SECONDS - start)) s"
timeout "${BENCH_SECONDS:-90}" python3 -m minserve.kernels.bench >"$out/bench.log" 2>&1; echo "bench ended after $((SECONDS - start)) s"
cat "$out"/warm-*.log | grep -v '^\[\]$'
grep -v '^\[{' "$out/bench.log"
tail -n "${TEST_LINES:-60}" "$out/tests.log"
exit "$status"
