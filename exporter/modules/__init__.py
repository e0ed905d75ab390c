"""The networks in deployment form: flat rows, in-place caches, standard ONNX ops. Traced, never trained."""
