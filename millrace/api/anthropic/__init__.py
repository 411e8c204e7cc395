"""Anthropic's Messages API: messages, their streams, and counting their tokens."""
