"""Packages: several models in one checkpoint, exported programs (.pt2), and tensors stored once."""
