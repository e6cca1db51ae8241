"""The HTTP surface, one module a resource. The names and paths are those of the Miles session server."""
