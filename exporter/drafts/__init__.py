"""Draft checkpoints: one spec, one loader per published format."""
