"""`miles.rollout.generate_hub.agentic_tool_call`: the requests of one rollout, in their order."""

import importlib
from typing import Any

import httpx


async def generate(input: Any) -> bytes:  # noqa: A002 (the name that Miles looks for)
    """Plays and collects one episode; returns the reply of the collect, which Miles decodes."""
    args = input.args
    if not args.session_server_ip or not args.session_server_ports:
        raise RuntimeError("no session server")
    server = f"{args.session_server_ip}:{args.session_server_ports[0]}"
    module, _, name = args.custom_agent_function_path.rpartition(".")
    agent = getattr(importlib.import_module(module), name)
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        opened = await client.post(f"http://{server}/sessions", json={})
        base_url = f"http://{server}/sessions/{opened.raise_for_status().json()['session_id']}"
        metadata = await agent(
            base_url=base_url,
            prompt=input.sample.prompt,
            request_kwargs=input.sampling_params,
            metadata={**input.sample.metadata, "max_seq_len": args.max_seq_len, "session_server_id": server},
        )
        body = {"max_seq_len": args.max_seq_len}
        if args.use_session_server == "v2" and metadata is not None:
            body["metadata"] = metadata
        collected = await client.post(f"{base_url}/samples", json=body)
        (await client.delete(base_url)).raise_for_status()
    return collected.raise_for_status().content
