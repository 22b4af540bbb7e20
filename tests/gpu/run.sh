#!/usr/bin/env bash
# Kernel tests, then the kernel bench, on a GPU machine, from the repository root: tests/gpu/run.sh [LOG_DIRECTORY [BENCH_OPTION ...]]
# The first run compiles for minutes; keep DG_JIT_CACHE_DIR and TRITON_CACHE_DIR for the next. Tables come last.
set -uo pipefail
out=${1:-/tmp/minserve-gpu-tests}; shift; mkdir -p "$out"
export OMP_NUM_THREADS=1
start=$SECONDS
python3 -m pytest tests/gpu -n "${TEST_PROCESSES:-10}" --confcutdir=tests/gpu -p no:cacheprovider --tb=short >"$out/tests.log" 2>&1
status=$?
echo "tests ended after $((SECONDS - start)) s"
python3 -m minserve.kernels.bench "$@" >"$out/bench.log" 2>&1
echo "bench ended after $((SECONDS - start)) s"
grep -v '^\[{' "$out/bench.log"
tail -n "${TEST_LINES:-60}" "$out/tests.log"
exit "$status"
