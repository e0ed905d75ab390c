"""Graphs made from a bundle's portable ones.

Tuned ones of the target and the draft, for ONNX Runtime on the CPU; and in `fuse_round` the optional one of a
whole round.
"""
