"""Text: templates, tokens, characters. The front's side of a request; knows no HTTP and no MLX."""
