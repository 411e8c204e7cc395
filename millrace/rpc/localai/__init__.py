"""LocalAI's backend: one process that LocalAI starts, gives a model, and asks for answers."""
