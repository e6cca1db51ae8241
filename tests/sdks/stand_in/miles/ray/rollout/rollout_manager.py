"""`miles.ray.rollout.rollout_manager`: the manager finds the function under a name of its own module."""

from argparse import Namespace

from miles.ray.rollout.router_manager import start_session_server


class RolloutManager:
    """Starts what rollouts need."""

    def __init__(self, args: Namespace) -> None:
        start_session_server(args)
