"""An engine that holds an encoder: texts in, numbers out, in batches of bounded size."""
