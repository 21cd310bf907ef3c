"""The HTTP server: three protocols in front of one engine."""
