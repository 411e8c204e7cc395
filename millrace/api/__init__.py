"""HTTP: one folder per protocol, each a thin translation at the two ends of the event stream."""
