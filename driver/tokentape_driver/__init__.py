"""The trainer's side of Tokentape: run an agent, get its training samples.

    async def agent(base_url, sample):
        openai = AsyncOpenAI(base_url=base_url, api_key="unused")
        reply = await openai.chat.completions.create(model="policy", messages=sample.metadata["messages"])
        return {"answer": reply.choices[0].message.content}

    async with TokentapeClient("http://tokentape:8080") as client:
        sample = RolloutSample(index=0, metadata={"messages": [{"role": "user", "content": "2 + 2?"}]})
        sample = await rollout(agent, sample, client=client, max_seq_len=32_768)

    batch = collate([sample])

With `mode="tree"`, sub-agents, retries and compacted conversations become samples of their own: `rollout`
returns a list of siblings, which share a `rollout_id`; `validate_rollout_ids`, `normalize_rewards` and
`rollout_mask_sums` treat them as the one rollout that they are.

`rollout` does an episode; `TokentapeClient.open_session` and `Session.collect_samples` are its parts, for
trainers that run the agent themselves. Any class with the fields of `RolloutSample` will do in its place.
`verify` asks the trainer's own model whether it gives the sampled tokens the recorded log-probs.
`errors` shows what can be raised; the server's own classes are in `tokentape_contracts.errors`.
"""

from tokentape_driver.client import TokentapeClient
from tokentape_driver.collate import collate
from tokentape_driver.credit import normalize_rewards, rollout_mask_sums
from tokentape_driver.errors import (
    CannotOverlay,
    CollectTimeout,
    ContractMismatch,
    DriverError,
    InvalidBatch,
    LeftoverState,
    MissingRolloutId,
    TokensLeftOut,
    TransportError,
    UnexpectedReply,
)
from tokentape_driver.rollout import rollout
from tokentape_driver.sample import RolloutSample, overlay
from tokentape_driver.session import Collected, Session
from tokentape_driver.siblings import validate_rollout_ids
from tokentape_driver.sync import SyncClient
from tokentape_driver.verify import Verification, verify

__all__ = [
    "CannotOverlay",
    "CollectTimeout",
    "Collected",
    "ContractMismatch",
    "DriverError",
    "InvalidBatch",
    "LeftoverState",
    "MissingRolloutId",
    "RolloutSample",
    "Session",
    "SyncClient",
    "TokensLeftOut",
    "TokentapeClient",
    "TransportError",
    "UnexpectedReply",
    "Verification",
    "collate",
    "normalize_rewards",
    "overlay",
    "rollout",
    "rollout_mask_sums",
    "validate_rollout_ids",
    "verify",
]
