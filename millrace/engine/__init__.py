"""The engine: one process per loaded model, one thread that owns MLX. Knows token ids only."""
