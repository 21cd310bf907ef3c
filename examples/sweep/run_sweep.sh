#!/usr/bin/env bash
# A curve per mode: one engine per point, one JSON line per point, then the charts.
#
#   TAG=EP1DP1 OUT=sweep examples/sweep/run_sweep.sh [MODEL [more arguments of examples/benchmark.py]]
#
# One tag is one curve, so put the parallel size into it. What may be set, with what the vendor's sweep takes:
#   MODES, DECODE_REQUESTS (requests at once), PREFILL_BATCHES (tokens of a step), CONTEXT, NON_CACHED, NEXTN, ACCEPTANCE
# A point that fails (out of memory, say) is named and the others go on. Pictures are not built, so encoders are not swept.
set -u -o pipefail

here=$(cd "$(dirname "$0")" && pwd)
model=${1:-nano}
[ $# -gt 0 ] && shift
python=${PYTHON:-python}
out=${OUT:-sweep}
tag=${TAG:-EP1DP1}
modes=${MODES:-prefill decode}
if [ "$model" = nano ]; then # 4,096 positions and a laptop
    context=${CONTEXT:-1024} non_cached=${NON_CACHED:-128}
    requests=${DECODE_REQUESTS:-1 2 4 8}
    batches=${PREFILL_BATCHES:-256 512 1024}
    echo "== nano: by default a context of 1,024 tokens and small points, not the vendor's" >&2
else
    context=${CONTEXT:-32768} non_cached=${NON_CACHED:-4096}
    requests=${DECODE_REQUESTS:-8 16 32 64 128 256}
    batches=${PREFILL_BATCHES:-4096 8192 16384 32768 65536}
fi

mkdir -p "$out"
failed=0
measure() { # mode, the name of what varies, its value, then the rest
    local mode=$1 name=$2 value=$3
    shift 3
    echo "== $mode, $name $value" >&2
    "$python" "$here/../benchmark.py" --mode "$mode" --tag "$tag" --model_name "$model" "--$name" "$value" \
        --context_length "$context" --non_cached_tokens "$non_cached" --nextn "${NEXTN:-3}" \
        --acceptance "${ACCEPTANCE:-0.75}" --result_jsonl "$out/$mode.jsonl" "$@" || {
        echo "== failed: $mode, $name $value" >&2
        failed=1
    }
}

for mode in $modes; do
    if [ "$mode" = decode ]; then
        for count in $requests; do measure decode decode_num_requests "$count" "$@"; done
    else
        for size in $batches; do measure prefill prefill_batch_size "$size" "$@"; done
    fi
    if [ -s "$out/$mode.jsonl" ]; then
        "$python" "$here/plot_pareto.py" "$out/$mode.jsonl" --output "$out/$mode.svg" || failed=1
    fi
done
exit $failed
