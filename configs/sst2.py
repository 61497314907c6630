"""Whether a phrase of a film review is positive: SST-2 (Socher et al., 2013), 60,614 training phrases.

    python train.py --config=configs/sst2.py --config.data.path=FOLDER

80.7 % of GLUE's 872 development sentences, which are the test split here; the mean of three seeds, three minutes on
two cores (docs/classification.md).
FOLDER holds train.tsv, valid.tsv and test.tsv, a phrase a line: 1 for positive or 0, tab, phrase.
"""

from ml_collections import ConfigDict

from configs import classifier


def get_config() -> ConfigDict:
    config = classifier.get_config()
    config.name = "sst2"
    config.model.num_classes = 2
    config.steps = 6_000  # about 6 epochs
    config.data.update(held_out=0.0, max_length=80)
    config.eval.every = 1_000
    return config
