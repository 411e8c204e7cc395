"""The prefix cache: a tree of token runs and the state that goes with them, in memory and on disk."""
