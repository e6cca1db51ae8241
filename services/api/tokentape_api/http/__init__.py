"""What is the same for every route: the server's bounds, callers, bodies, errors, log lines."""
