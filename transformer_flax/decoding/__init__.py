"""Turns a model's outputs into text or classes, and scores them."""
