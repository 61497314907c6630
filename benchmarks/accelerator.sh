#!/usr/bin/env bash
# Everything worth measuring on an accelerator, the most valuable first: bash benchmarks/accelerator.sh OUT [MULTI30K]
#
# OUT gets a file of each figure as soon as it is there, so the script may be stopped at any time. MULTI30K is a folder
# of text for the loop and for table 3, whose sweep comes last, takes 8 minutes on an H200, and resumes with the same
# command. A figure that cannot be had (no PyTorch, too little memory) is named in OUT/failed.txt. `bash
# benchmarks/accelerator.sh --commands` prints the commands.
set -uo pipefail
: "${1:?where the figures go}"
out=$([ "$1" = --commands ] && echo OUT || realpath -m "$1")
multi30k=${2:+$(realpath -m "$2")}
cd "$(dirname "$0")/.."

run() { # NAME COMMAND...
    local name=$1
    shift
    if [ "$out" = OUT ]; then
        printf '%q ' "$@"
        echo
        return
    fi
    mkdir -p "$out"
    echo "== $name: $*"
    "$@" 2>&1 | tee "$out/$name.txt" || echo "$name" | tee -a "$out/failed.txt"
}

figure() { # NAME BENCHMARK...
    run "$1" python "${@:2}" "--json=$out/$1.json"
}

# The step of 784 x (32 + 32) tokens in bfloat16, and its share of the data sheet's peak; then beside PyTorch's, which
# needs the memory that JAX would allocate beforehand.
figure base benchmarks/train.py --sizes=base --steps=10 --peers=
figure big benchmarks/train.py --sizes=big --steps=5 --repeats=5 --peers=
run base_beside_pytorch env XLA_PYTHON_CLIENT_PREALLOCATE=false \
    python benchmarks/train.py --sizes=base --steps=10 "--json=$out/base_beside_pytorch.json"

# The same with attention as one kernel of cuDNN, beside the plain one, also for rows of 256 tokens; then also with q, k
# and v as products of their own.
figure cudnn benchmarks/train.py --sizes=base --steps=10 --peers= --attention=plain,cudnn
figure cudnn_long benchmarks/train.py --sizes=base --steps=10 --peers= --attention=plain,cudnn --rows=96 --length=256
run cudnn_unmerged env XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_dot_merger_threshold_mb=0" \
    python benchmarks/train.py --sizes=base --steps=10 --peers= --attention=cudnn "--json=$out/cudnn_unmerged.json"

# The laws, with products in float32; the one of eight devices needs eight.
run laws env JAX_PLATFORMS= JAX_DEFAULT_MATMUL_PRECISION=highest python -m pytest -q -n 0 -m "" -k "not eight" tests/model/test_attention.py \
    tests/model/test_transformer.py tests/model/test_bfloat16.py tests/decoding/test_translator.py tests/decoding/test_any_text.py tests/training/test_loss.py

# The search, 3,000 sentences of newstest2013's length in three batches, beside CTranslate2 in float16.
figure search benchmarks/decode.py --sizes=base --batch_size=1000 --source_length=28 --length=28
figure search_small_batches benchmarks/decode.py

# Eight seeds of a small model in one program.
figure seeds benchmarks/seeds.py --counts=8 --steps=20

# What config.deterministic costs.
run deterministic env XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_deterministic_ops=true" \
    python benchmarks/train.py --sizes=base --steps=10 --peers= "--json=$out/deterministic.json"

# Fields that save memory.
figure chunks benchmarks/train.py --sizes=base --steps=10 --repeats=5 --peers= --loss_chunks=8
figure remat benchmarks/train.py --sizes=base --steps=10 --repeats=5 --peers= --loss_chunks=8 --remat=layers
figure scanned benchmarks/train.py --sizes=base --steps=10 --repeats=5 --peers= --loss_chunks=8 --remat=layers --scan_layers
figure accumulation benchmarks/train.py --sizes=base --steps=10 --repeats=5 --peers= --accumulation_steps=4

# The loop beside its steps.
figure loop benchmarks/loop.py
if [ -n "$multi30k" ]; then
    figure loop_multi30k benchmarks/loop.py --config=configs/multi30k.py "--config.data.path=$multi30k"
    fast="--xla_disable_hlo_passes=triton-softmax-rewriter --xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0"
    run table3 env XLA_FLAGS="${XLA_FLAGS:-} $fast" python -m transformer_flax.sweep --rows=all --seeds=5 \
        --config=configs/table3_small.py:multi30k "--config.data.path=$multi30k" --config.eval.every=0 \
        --config.decode.batch_size=1024 --config.checkpoint.every=5000 --vectorize_seeds --jobs=10 "--workdir=$out/table3"
fi
