"""Endpoints that answer with numbers: embeddings, rerank, scores, classes."""
