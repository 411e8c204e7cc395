"""The real gateway in front of our workers (`make test-gateway`)."""
