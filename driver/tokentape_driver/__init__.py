"""The trainer's side of Tokentape: run an agent, get one training sample.

    async def agent(base_url, sample):
        openai = AsyncOpenAI(base_url=base_url, api_key="unused")
        reply = await openai.chat.completions.create(model="policy", messages=sample.metadata["messages"])
        return {"answer": reply.choices[0].message.content}

    async with TokentapeClient("http://tokentape:8080") as client:
        sample = RolloutSample(index=0, metadata={"messages": [{"role": "user", "content": "2 + 2?"}]})
        sample = await rollout(agent, sample, client=client, max_seq_len=32_768)

    batch = collate([sample])

`rollout` does an episode; `TokentapeClient.open_session` and `Session.collect_samples` are its parts, for
trainers that run the agent themselves. Any class with the fields of `RolloutSample` will do in its place.
`errors` shows what can be raised; the server's own classes are in `tokentape_contracts.errors`.
"""

from tokentape_driver.client import TokentapeClient
from tokentape_driver.collate import collate
from tokentape_driver.errors import (
    CannotOverlay,
    CollectTimeout,
    ContractMismatch,
    DriverError,
    LeftoverState,
    TransportError,
    UnexpectedReply,
)
from tokentape_driver.rollout import rollout
from tokentape_driver.sample import RolloutSample, overlay
from tokentape_driver.session import Collected, Session
from tokentape_driver.sync import SyncClient

__all__ = [
    "CannotOverlay",
    "CollectTimeout",
    "Collected",
    "ContractMismatch",
    "DriverError",
    "LeftoverState",
    "RolloutSample",
    "Session",
    "SyncClient",
    "TokentapeClient",
    "TransportError",
    "UnexpectedReply",
    "collate",
    "overlay",
    "rollout",
]
