"""Proof that a bundle computes what its PyTorch originals compute, stage by stage."""
