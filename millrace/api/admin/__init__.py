"""The server about itself: health and status."""
