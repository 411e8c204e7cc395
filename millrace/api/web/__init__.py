"""The page at /: its files, and how they are sent. It is a client of the API like any other."""
