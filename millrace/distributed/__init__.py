"""What the processes of one split model share: who they are, how they prove it, and what they say beside
the collectives. Knows no model, no engine and no MLX."""
