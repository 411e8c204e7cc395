"""The server's side of ranks: workers that wait for a part of a model, and the group they make."""
