#!/bin/sh
# Encodes a corpus, makes the synthetic streams and trains, side by side on one GPU machine. Run from the repository root.
#   bash training/launch.sh SHARDS WORK SECONDS PHRASES
# SHARDS: folder with train-*.jsonl.xz and valid.jsonl.xz; WORK: folder for streams, logs and checkpoints.
set -e
shards=$1 work=$2 seconds=$3 phrases=$4
mkdir -p "$work/data"
cores=$(nproc)
half=$(( (cores + 1) / 2 ))
build() { python3 -m training.synth.build "$@" --out "$work/data" --processes "$cores"; }
(
  python3 -m training.synth.build chat --phrases "$phrases" --out "$work/data" --count 120000 --processes "$half" &
  OMP_NUM_THREADS=1 python3 -m training.corpus "$shards"/train-*.jsonl.xz --out "$work/data" --processes "$half"
  wait
  build look --length 1024 --data "$work/data" --count 12000
  build look --length 1024 --data "$work/data" --count 36000 --seed 2
  build look --length 4096 --data "$work/data" --count 14000
  build chat --phrases "$phrases" --count 140000 --seed 2
) > "$work/encode.log" 2>&1 &
python3 -m training.train --data "$work/data" --out "$work/run" --seconds "$seconds" \
  --wait prose,doc,code,chat --valid "$shards/valid.jsonl.xz" --phrases "$phrases" --resume
wait
