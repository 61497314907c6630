#!/usr/bin/env bash
# All figures that docs/performance.md wants of an accelerator: bash benchmarks/accelerator.sh OUT [MULTI30K]
# OUT gets a JSON file of each; MULTI30K is a folder of text for the loop. Some 15 minutes on a large GPU, a card of 24 GB is
# enough. What one figure cannot be had for (no torch, too little memory) keeps none of the others.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?where the figures go}")
mkdir -p "$out"

figure() {
    local name=$1
    shift
    echo "== $name: python $*"
    python "$@" "--json=$out/$name.json" || echo "== $name: failed" | tee -a "$out/failed.txt"
}

# The step: base on 784 x (32 + 32) tokens in bfloat16, beside PyTorch's; then its memory, and the variants that save some.
figure train benchmarks/train.py --sizes=small,base --steps=10
figure memory benchmarks/train.py --sizes=base --repeats=0 --peers=
for chunks in 4 8; do
    figure "chunks$chunks" benchmarks/train.py --sizes=base --steps=10 --peers= --loss_chunks=$chunks
done
figure accumulation benchmarks/train.py --sizes=base --steps=10 --peers= --accumulation_steps=4 --loss_chunks=2
figure scanned benchmarks/train.py --sizes=base --steps=10 --peers= --loss_chunks=8 --scan_layers
for remat in products layers; do
    figure "remat_$remat" benchmarks/train.py --sizes=base --steps=10 --peers= --loss_chunks=8 --remat=$remat
done
XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_deterministic_ops=true" \
    figure deterministic benchmarks/train.py --sizes=base --steps=10 --peers=

# The search: 3,000 sentences of newstest2013's length, 1,000 at a time, and the shapes of the CPU's table.
figure decode_newstest benchmarks/decode.py --sizes=base --beam_sizes=4 --batch_size=1000 --source_length=28 --length=28 \
    --dtype=bfloat16
figure decode benchmarks/decode.py --dtype=bfloat16

# The loop beside its steps.
figure loop benchmarks/loop.py
if [ -n "${2:-}" ]; then
    figure loop_multi30k benchmarks/loop.py --config=configs/multi30k.py --config.data.path="$2"
fi
