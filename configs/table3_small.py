"""Table 3 on a laptop: a base that a small set can train, for sweeps over the rows.

    python -m transformer_flax.sweep --config=configs/table3_small.py --rows=all --seeds=3 --jobs=2
    python -m transformer_flax.sweep --config=configs/table3_small.py:multi30k --config.data.path=FOLDER --rows=base,A,D

Rows keep the paper's ratios to their base (transformer_flax/ablation/table3.py), so the base is such that each divides:
num_layers by 3 (rows C-N2, C-N4 and C-N8 have a third, two thirds and four thirds of them), num_heads by 8 (A-h1),
d_k and d_v by 4 (B-dk16, A-h32), d_model by 4 (C-d256, whose sinusoids come in pairs). All rows together cost 31 runs
of the base, of which `big` takes 12: four times the parameters for three times the steps.

It is small, has few data and is stopped early, so that rows can differ. Number words are easy: any row learns them all
in the end, and then all tie. Here the base gets 60 to 95 % of them right. The steps are
few, so a row that learns faster has an advantage that it would not have at the paper's length: few layers learn number
words sooner, as does a model without dropout, and four layers have hardly begun. As in the paper, the final step's raw
parameters are scored, on the validation set. docs/table3/numbers/report.md is the sweep of the first line: an hour on
two cores, where a run of the base takes a minute, alone or beside another. On Multi30k a thousand steps are too few for
some rows to look at the source, `big` among them (docs/sweeps.md has what shows it, and how many would do).
"""

from ml_collections import ConfigDict

from configs import multi30k, numbers
from transformer_flax.errors import UserError

DATA = {"numbers": numbers, "multi30k": multi30k}


def get_config(data: str = "numbers") -> ConfigDict:
    if data not in DATA:
        raise UserError(f"table3_small.py:{data}: the data behind the colon must be of {', '.join(DATA)}")
    config = DATA[data].get_config()
    config.name = f"table3_small-{data}"
    config.label_smoothing = 0.1
    config.model.update(num_layers=3, num_heads=8, dropout=0.1)
    if data == "numbers":
        config.steps = 300
        config.model.update(d_model=64, d_ff=256, d_k=8, d_v=8)
        config.optimizer.update(factor=0.3, warmup_steps=100)  # that of the paper is for 12 times the batch
    else:
        config.steps = 1_000
        config.data.vocab_size = 2_000
        config.model.update(d_model=64, d_ff=256, d_k=8, d_v=8)
        config.optimizer.update(factor=0.5, warmup_steps=200)
    config.eval.update(every=config.steps // 4, sentences=100, average=1, final_average=1, test=False)
    config.checkpoint.update(every=config.steps // 4, keep=1)
    config.log.every = 50
    return config
