"""`millrace prove`: whether what is served here is what one request alone would get, and how fast.

A real server is asked over HTTP; nothing in this package reaches into an engine, and MLX is used in
processes of their own.
"""
