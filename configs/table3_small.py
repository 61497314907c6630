"""Table 3 on a laptop: a base that a small set can train, for sweeps over the rows.

    python -m transformer_flax.sweep --config=configs/table3_small.py --rows=all --seeds=3 --jobs=2
    python -m transformer_flax.sweep --config=configs/table3_small.py:multi30k --config.data.path=FOLDER --rows=base,big

Rows keep the paper's ratios to their base (transformer_flax/ablation/table3.py), so the base's sizes must be divisible:
num_layers by 3 (rows C-N2, C-N4 and C-N8 have a third, two thirds and four thirds of the layers), num_heads by 8
(A-h1), d_k and d_v by 4 (B-dk16, A-h32), d_model by 4 (C-d256, whose sinusoids come in pairs). All rows together cost
as much as 31 runs of the base. `big` takes 11 of these 31, as it has nearly four times the parameters and three times
the steps.

Number words are easy: in the end, any row learns all of them, and then all rows tie. So the base on number words stops
early, when it gets 77 to 90 % of them right. Therefore a row that learns faster has an advantage that it would not have
at the paper's length. docs/table3/numbers/report.md is the sweep of the first command. The sweep takes an hour on two
cores, and a run of the base takes a minute, alone or beside another run.

The base on Multi30k is a small version of the paper's base: 12.6 epochs (the paper's: some 18), 1.6 million parameters
for 0.6 million target tokens, and no row with d_k below 4. Its rate is half of the one that suits the base best, as
`big` fails with that one in two of three seeds (docs/sweeps.md). docs/table3/multi30k/report.md is its sweep: all rows
with five seeds in 8 minutes of one H200 (docs/performance.md). A run of the base takes 23 minutes of one core.

As in the paper, the final step's raw parameters are scored, on the validation set.
"""

from ml_collections import ConfigDict

from configs import multi30k, numbers
from transformer_flax.errors import look_up

DATA = {"numbers": numbers, "multi30k": multi30k}


def get_config(data: str = "numbers") -> ConfigDict:
    config = look_up("the data behind the colon", data, DATA).get_config()
    config.name = f"table3_small-{data}"
    config.label_smoothing = 0.1
    config.model.update(num_layers=3, num_heads=8, dropout=0.1)
    if data == "numbers":
        config.steps = 300
        evaluations = 4
        config.model.update(d_model=64, d_ff=256, d_k=8, d_v=8)
        config.optimizer.update(factor=0.3, warmup_steps=100)  # the paper's factor is for batches 12 times as large
    else:
        config.steps = 5_000
        evaluations = 10
        config.data.update(vocab_size=2_000, num_buckets=6)
        config.data.update(batching="packed", max_length=64)  # one shape of training, compiled once
        config.model.update(d_model=128, d_ff=512, d_k=16, d_v=16, branch_init=0.5)  # 0.5: docs/initial_values.md
        config.optimizer.update(factor=0.5, warmup_steps=400, cooldown=0.0)
    config.eval.update(every=config.steps // evaluations, sentences=100, average=1, final_average=1, test=False)
    config.checkpoint.update(every=config.steps // evaluations, keep=1)
    config.log.every = 50
    config.parallel.cpu_devices = 1  # a sweep gives each run a core
    config.decode.update(length_penalty="gnmt", alpha=0.6)  # the paper's
    config.decode.min_length = 0  # as in the sweeps of docs/table3, so that they can be resumed
    return config
