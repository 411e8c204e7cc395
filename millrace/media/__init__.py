"""Pictures from outside: where they come from, fetched safely, decoded within limits."""
