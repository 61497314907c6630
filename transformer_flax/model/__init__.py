"""The Transformer: arrays in, arrays out. Knows nothing of text, files or runs.

To read it beside the paper, begin with `transformer` (figure 1), `layers` (its boxes), `attention` and `scores`
(section 3.2), `positions` (section 3.5) and `dropout` (section 5.4). `config` has the sizes.

The other files can wait. `cached_attention` decodes step by step. `local_attention` is for section 4. `stack` and
`residuals` are for many layers. `linear` computes products. `registry` makes models, and `flops` counts their cost.
"""
