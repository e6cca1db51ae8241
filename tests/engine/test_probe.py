"""The reference engine gives all that the recording needs, and is asked as any other engine."""

from __future__ import annotations

import httpx

from tokentape_api.engine import SGLangEngine, Wanted
from tokentape_api.engine.probe import PROMPT


async def test_every_line_is_ok(engine_url: str) -> None:
    """A real server passes the probe, and shows that its ids hold the stop token."""
    engine = SGLangEngine(engine_url, timeout_s=60.0)
    try:
        checks = {check.name: check for check in await engine.probe(60.0) or []}
    finally:
        await engine.close()
    assert {check.state for check in checks.values()} == {"ok"}
    assert checks["stop token"].detail.startswith("in the ids: ")


async def test_with_experts(moe_client: httpx.Client) -> None:
    """So does a mixture of experts, whose rows are asked for as well."""
    wanted = {"routed_experts": Wanted(layers=2)}
    engine = SGLangEngine(str(moe_client.base_url), timeout_s=60.0, replay=wanted, incremental=True)
    try:
        checks = {check.name: check for check in await engine.probe(60.0) or []}
    finally:
        await engine.close()
    assert {name: check.detail for name, check in checks.items() if check.state != "ok"} == {}
    assert checks["stop token"].detail.startswith("in the ids: ")
    assert checks["routed_experts"].detail.startswith(f"{len(PROMPT) + 3} rows of 2 layers")
