"""Side-by-side timings: every figure is a ratio of medians, measured alternately in one process."""
