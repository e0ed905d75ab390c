"""Target checkpoints: one spec, one small file per family."""
