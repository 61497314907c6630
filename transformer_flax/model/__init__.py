"""The Transformer: arrays in, arrays out. Knows nothing of text, files or runs.

To read it beside the paper, begin with `transformer` (figure 1), `layers` (its boxes), `attention` and `scores`
(section 3.2) and `positions` (section 3.5).

The other files can wait. `config` has the sizes, and `dropout` is that of section 5.4. `stack` applies N layers.
`residuals` has other residual connections than the paper's. `local_attention` is for section 4. `linear` computes
products. `registry` makes models, and `flops` counts their cost.
"""
