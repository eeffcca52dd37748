#!/usr/bin/env bash
# Builds mok, runs the GPU tests and benchmarks; for a machine with GPUs at hand for minutes only.
#
#   OUT=/some/folder tools/gpu_check.sh [step ...]
#
# Steps: build tests benchmarks sanitizer; without arguments these four. Logs and JSON files go to $OUT (default:
# build/gpu-check). Nothing can hang: each command has its own limit, all together $BUDGET seconds (default 520);
# what no longer fits is reported as left out. The last lines are one table; the exit status says whether all of
# it passed. PYTHON names the interpreter that has torch; FILES and BENCHMARKS pick test files and benchmarks.
#
# For two GPUs: ep2 (the tests that need two, then figures and time lines of two ranks), or only ep2-tests or
# ep2-figures. Most important first; at most 8 files stay in $OUT: all logs in ep2.log, all records in ep2.json,
# pictures. demo trains examples/demo on one or two GPUs (DEMO_STEPS, default 400). DRY=1 runs the same commands
# with tiny sizes on the CPU, where tests of GPUs skip themselves.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
exec </dev/null
export OUT=${OUT:-build/gpu-check} PYTHON=${PYTHON:-python} PYTHONPATH=$PWD
export PYTHONDONTWRITEBYTECODE=1 MOK_REQUIRE_GPU=1
# NVLink multicast is nothing that mok uses, and not every host stands it.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
budget=${BUDGET:-520}
mkdir -p "$OUT"
dry=${DRY:-0}
steps=${*:-build tests benchmarks sanitizer}
table=()
ep2_logs=()
failed=0

# run NAME LIMIT COMMAND...: the command under a limit, its output in $OUT/NAME.log, one row for the table.
run() {
    local name=$1 limit=$2 begin=$SECONDS status left=$((budget - SECONDS))
    shift 2
    if [ "$left" -lt 10 ]; then
        row "$name" "left out" 0 "no time left"
        failed=1
        return
    fi
    [ "$limit" -gt "$left" ] && limit=$left
    timeout -k 10 "$limit" "$@" >"$OUT/$name.log" 2>&1
    status=$?
    local note
    note=$(grep -E '(passed|failed|error|skipped).* in [0-9.]+s|target|ERROR SUMMARY' "$OUT/$name.log" | tail -1)
    [[ $name == ep2-* ]] && ep2_logs+=("$name")
    case $status in
    0) row "$name" passed $((SECONDS - begin)) "$note" ;;
    124 | 137) row "$name" "TIMED OUT" $((SECONDS - begin)) "after $limit s; $note" ;;
    *) row "$name" "FAILED $status" $((SECONDS - begin)) "$note" ;;
    esac
    if [ $status -ne 0 ]; then
        failed=1
        echo "== $name: the end of $OUT/$name.log"
        tail -n 40 "$OUT/$name.log"
    fi
    return $status
}

row() {
    table+=("$(printf '%-26s %-10s %5s s  %s' "$1" "$2" "$3" "${4:0:90}")")
    echo "${table[-1]}"
}

wanted() {
    [[ " $steps " == *" $1 "* ]]
}

{
    date -u
    git rev-parse HEAD 2>/dev/null
    nvidia-smi 2>&1
    nvidia-smi topo -m 2>&1
    nvidia-smi topo -p2p rw 2>&1
    "$PYTHON" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.device_count())' 2>&1
} >"$OUT/machine.log"

if wanted build; then
    export MOK_WITH_CUDA=1
    # In place: the interpreter with torch may come without pip.
    run build 280 "$PYTHON" setup.py build_ext --inplace
fi

if wanted tests; then
    # Each file in its own process: a trap ends a process's CUDA context.
    for file in ${FILES:-tests/gpu/test_*.py}; do
        name=$(basename "$file" .py)
        run "$name" 100 "$PYTHON" -m pytest -q --maxfail=8 -p no:cacheprovider -o faulthandler_timeout=80 "$file"
    done
fi

if wanted benchmarks; then
    for name in ${BENCHMARKS:-preparation combine barrier grouped_gemm moe_forward}; do
        run "bench-$name" 60 "$PYTHON" "benchmarks/$name.py" --out "$OUT"
        [ -s "$OUT/bench-$name.log" ] && cat "$OUT/bench-$name.log"
    done
fi

if wanted sanitizer; then
    if command -v compute-sanitizer >/dev/null; then
        # Shapes small enough for tools that slow a kernel down a hundredfold.
        pick='test_a_ring or named_barrier or bulk or tensor_copies or either_of_two or combination or every_time or rows_that_are_not_aligned'
        for tool in memcheck racecheck synccheck; do
            run "sanitizer-$tool" 90 env MOK_TESTS_IN_PROCESS=1 compute-sanitizer --tool "$tool" --error-exitcode 9 \
                "$PYTHON" -m pytest -q --maxfail=8 -p no:cacheprovider tests/gpu -k "$pick"
        done
    else
        row sanitizer "not there" 0 "compute-sanitizer is not on PATH"
    fi
fi

# ep2_test NAME LIMIT FILE...: tests of two processes, each with a GPU of its own.
ep2_test() {
    local name=$1 limit=$2
    shift 2
    run "ep2-$name" "$limit" "$PYTHON" -m pytest -q --maxfail=4 -p no:cacheprovider \
        -o faulthandler_timeout=$((limit - 20)) "$@"
}

# ep2_bench NAME LIMIT BENCHMARK ARGUMENT...: records to $work.
ep2_bench() {
    local name=$1 limit=$2 file=$3
    shift 3
    [ "$dry" = 1 ] && set -- "$@" --tiny --device cpu
    # A rank that is lost is named before the benchmark's own limit ends the case.
    run "ep2-$name" "$limit" env MOK_TIMEOUT_S=30 "$PYTHON" "benchmarks/$file.py" --out "$work/$name" "$@"
    [ -s "$OUT/ep2-$name.log" ] && cat "$OUT/ep2-$name.log"
}

# linked: two GPUs that reach each other's memory, without which every test of two ranks would fail alike.
linked=("$PYTHON" -c '
import torch
from mok import workspace
for device in range(torch.cuda.device_count()):
    print(workspace.describe_device(device))
assert torch.cuda.device_count() < 2 or torch.cuda.can_device_access_peer(0, 1), "no P2P between GPUs"
')
[ "$dry" = 1 ] && linked=(true)

work=$OUT/ep2-work
if wanted ep2 || wanted ep2-tests; then
    [ "$dry" = 1 ] && export MOK_REQUIRE_GPU=0
    # Limits beyond 80 s: a hang is then named by the harness (60 s) before faulthandler ends pytest.
    if run ep2-link 60 "${linked[@]}"; then
        ep2_test ptx 90 tests/gpu/test_ptx.py
        ep2_test heap 90 tests/gpu/test_heap.py
        ep2_test barrier 90 tests/gpu/test_barrier.py
        ep2_test moe 120 tests/gpu/test_moe_ep.py
        ep2_test nccl 90 tests/gpu/test_collective.py -k nccl
        ep2_test trace 90 tests/gpu/test_trace.py
        ep2_test barrier-ends 100 tests/gpu/test_barrier_ends.py
        ep2_test preparation 100 tests/gpu/test_preparation.py
    fi
fi
if wanted ep2 || wanted ep2-figures; then
    mkdir -p "$work"
    # Of what is left, three quarters for whole calls: they begin no case beyond two thirds.
    ep2_bench bench-barrier 60 barrier --ranks 2
    ep2_bench bench-preparation 60 preparation --ranks-only
    left=$((budget - SECONDS))
    ep2_bench layer $((left * 3 / 4)) moe_layer --ranks 2 --stages --budget $((left * 2 / 3))
    ep2_bench timeline 150 moe_layer --ranks 2 --only-traced --trace "A inference,A,B inference,D"
fi
if wanted demo; then
    # On as many GPUs as there are, two at most. A longer run of it: DEMO_STEPS=2000.
    ranks=$("$PYTHON" -c 'import torch; print(min(2, max(1, torch.cuda.device_count())))')
    demo=(--ranks "$ranks" --device cuda --steps "${DEMO_STEPS:-400}")
    [ "$dry" = 1 ] && demo=(--ranks 2 --device cpu --steps 4 --max-loss 9)
    folder=$(mktemp -d)
    run demo 300 "$PYTHON" examples/demo/train.py "${demo[@]}" --out "$folder" && tail -n 3 "$OUT/demo.log"
    [ -f "$folder/loss.png" ] && mv "$folder/loss.png" "$OUT/demo-loss.png"
    rm -rf "$folder"
fi
if [ ${#ep2_logs[@]} -gt 0 ]; then
    for name in "${ep2_logs[@]}"; do
        echo "==== $name"
        cat "$OUT/$name.log"
        rm -f "$OUT/$name.log"
    done >"$OUT/ep2.log"
    cat "$OUT/machine.log" >>"$OUT/ep2.log" && rm -f "$OUT/machine.log"
    if [ -d "$work" ]; then
        "$PYTHON" tools/join_results.py "$work" "$OUT/ep2.json"
        find "$work" -name '*-rank0.png' | head -6 | while read -r picture; do mv "$picture" "$OUT/"; done
        rm -rf "$work"
    fi
fi

echo
echo "== gpu_check: $(git rev-parse --short=12 HEAD 2>/dev/null) in $SECONDS s, logs in $OUT"
printf '%s\n' "${table[@]}"
exit $failed
