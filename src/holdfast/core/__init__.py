"""Pure values and no I/O: boxes, dtypes, chunks, lazy tensors, trees, checkpoints."""
