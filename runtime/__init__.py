"""A bundle at work: engines, the speculative loop, text. Imports neither torch nor onnx."""
