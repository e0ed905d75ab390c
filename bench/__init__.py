"""What decoding costs: plain and speculative, several bundles, other programs, in one run."""
