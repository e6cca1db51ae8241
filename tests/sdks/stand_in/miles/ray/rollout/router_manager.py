"""`miles.ray.rollout.router_manager`, as far as an adapter meets it."""

from argparse import Namespace


def start_session_server(args: Namespace) -> None:
    """Where Miles starts session servers of its own."""
    raise RuntimeError("this would start a session server of Miles")
