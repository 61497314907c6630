"""The Transformer: arrays in, arrays out. Knows nothing of text, files or runs.

To read it beside the paper, begin with `transformer` (figure 1), `layers` (its boxes), `attention` (section 3.2) and
`positions` (section 3.5). `config` has the sizes, and `dropout` section 5.4.

The other files can wait. `cached_attention` decodes step by step. `scores` and `local_attention` are attention's
variants (sections 3.2.1 and 4). `stack` and `residuals` are for many layers. `linear` computes products. `registry` and
`flops` make models and count their cost.
"""
