"""Names of the activations that are implemented; importable without torch."""

ACTIVATION_NAMES = ("gelu", "gelu_pytorch_tanh", "relu", "silu")
