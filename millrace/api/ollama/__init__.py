"""Ollama's API under /api: chat, generate, and the library of models, as lines of JSON."""
