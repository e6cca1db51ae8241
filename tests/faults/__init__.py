"""Real processes, killed and cut off at any moment, and a checker of what remains."""
