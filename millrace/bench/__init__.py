"""The load generator behind `millrace bench`.

It talks to any OpenAI-compatible server over HTTP and knows nothing of the engine: workload, stats
and interleaving are pure, `load` does the requests, `report` and `plot` show what was measured.
"""
