"""Vectors of words, from what stands around them (Mikolov et al., 2013)."""
