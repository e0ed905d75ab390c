"""The contract between exporter and runtime: a bundle on disk. Imports neither torch nor onnx."""
