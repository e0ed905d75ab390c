"""Graphs for ONNX Runtime on the CPU, made from the portable target graph of a bundle."""
