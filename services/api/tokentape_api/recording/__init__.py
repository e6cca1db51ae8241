"""A chat turn from its request to its event in the stream."""
