"""A worker of the SMG gateway: token ids in, token ids out, in the protocols of two engines it knows."""
