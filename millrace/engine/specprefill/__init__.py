"""SpecPrefill: a draft model scores a long prompt's tokens, and the model runs those that matter."""
