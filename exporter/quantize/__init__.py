"""From a float32 bundle to one with integer weights."""
