#!/usr/bin/env bash
# All that is shown on a GPU machine, from the repository root: tests/gpu/run.sh [LOG_DIRECTORY [KERNEL_BENCH_OPTION ...]]
# Tests, every mode through HTTP, decode steps, kernels; a log each, tables last. The first run compiles for minutes; keep
# DG_JIT_CACHE_DIR and TRITON_CACHE_DIR for the next.
set -uo pipefail
out=${1:-/tmp/minserve-gpu-tests}; shift; mkdir -p "$out"
export OMP_NUM_THREADS=1
status=0
run() { # NAME COMMAND ...
    local name=$1 start=$SECONDS; shift
    "$@" >"$out/$name.log" 2>&1 || { status=1; echo "$name FAILED"; }
    echo "$name ended after $((SECONDS - start)) s"
}
step() { run "step-$1" python3 -m minserve bench step "configs/shapes/$2" --steps 40 "${@:3}"; }

pytest=(python3 -m pytest --confcutdir=tests/gpu -p no:cacheprovider --tb=short)
run tests "${pytest[@]}" tests/gpu -n "${TEST_PROCESSES:-10}" --ignore tests/gpu/test_expert_parallel.py
run ranks "${pytest[@]}" tests/gpu/test_expert_parallel.py
run modes python3 tests/gpu/serve_modes.py "$out/modes" 120
run twin python3 -m tools.quantize_fp8 minserve/assets/tiny-deepseek-v3 "$out/fp8"
run modes-fp8 python3 tests/gpu/serve_modes.py "$out/modes-fp8" 120 "$out/fp8"
step qwen3 qwen3-30b-a3b
step moonlight moonlight-16b-a3b
step deepseek deepseek-v3 --layers 8 --modes graph --shared-expert serial overlap
step deepseek-fused deepseek-v3 --layers 8 --modes graph --shared-expert fused
step qwen2 qwen2-57b-a14b --layers 10 --modes graph --shared-expert serial overlap
run kernels python3 -m minserve.kernels.bench "$@"
for name in step-qwen3 step-moonlight step-deepseek step-deepseek-fused step-qwen2 kernels modes modes-fp8; do
    echo "== $name"
    grep -v '^\[\?{' "$out/$name.log"
done
tail -n "${TEST_LINES:-60}" "$out/tests.log" "$out/ranks.log"
exit "$status"
