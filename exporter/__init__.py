"""From checkpoints to a bundle: specs, deployment modules, tracing, weights, parity. May import torch."""
