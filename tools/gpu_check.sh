#!/usr/bin/env bash
# Builds mok, runs the GPU tests and benchmarks; for a machine with GPUs that is lent for minutes.
#
#   OUT=/some/folder tools/gpu_check.sh [step ...]
#
# Steps: build tests benchmarks sanitizer; without arguments all of them. Logs and JSON files go to $OUT
# (default: build/gpu-check). Nothing can hang: each command has its own limit, all together $BUDGET seconds
# (default 520); what no longer fits is reported as left out. The last lines are one table; the exit status says
# whether all of it passed. PYTHON names the interpreter that has torch; FILES and BENCHMARKS pick test files and
# benchmarks.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
exec </dev/null
export OUT=${OUT:-build/gpu-check} PYTHON=${PYTHON:-python} PYTHONPATH=$PWD
export PYTHONDONTWRITEBYTECODE=1 MOK_REQUIRE_GPU=1
budget=${BUDGET:-520}
mkdir -p "$OUT"
steps=${*:-build tests benchmarks sanitizer}
table=()
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

echo
echo "== gpu_check: $(git rev-parse --short=12 HEAD 2>/dev/null) in $SECONDS s, logs in $OUT"
printf '%s\n' "${table[@]}"
exit $failed
