"""The demo from start to verdict."""

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokentape_cli import options, up
from tokentape_cli.demo.agent import Agent
from tokentape_cli.demo.branches import CompactingAgent, DelegatingAgent, RetryingAgent
from tokentape_cli.demo.show import legend, show, show_tree
from tokentape_cli.embedded import EmbeddedValkey, EmbeddedValkeyError
from tokentape_cli.options import Setting
from tokentape_cli.processes import ProcessEnded, Processes, answers, free_port
from tokentape_contracts.accounting import TRAINED, Accounting
from tokentape_core import logs
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_driver import RolloutSample, TokentapeClient, rollout, verify

_ENGINE_READY_S = 180.0
_LOG_LINES = 20
_BRANCHING = (RetryingAgent, CompactingAgent, DelegatingAgent)
_QUESTIONS = (
    ("Add the degrees of Rome and Oslo.", "What is 3 plus 4?"),
    ("What is the weather in Paris?", "And in Lima?", "And in Tokyo?"),
    ("Which is warmer, Cairo or Oslo?",),
    ("What is 2 plus 5 plus 8?", "What is the capital of Peru?"),
    ("What is the weather in the capital of Japan?", "And in Rome?"),
    ("Add the degrees of the capital of Egypt and Lima.",),
    ("What is the capital of France?", "What is the weather in Paris?"),
    ("What is 9 plus 6?", "Which is warmer, Lima or Tokyo?"),
)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; 0 if every agent's sample was collected and verified.

    What its processes log goes to a file beside the model: on the screen are the agents.
    """
    log = Path(arguments.model_dir).parent / "demo.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.ExitStack() as stack:
            valkey = stack.enter_context(EmbeddedValkey())
            processes = stack.enter_context(Processes(log))
            with _step(f"starting the reference engine (all logs: {log})"):
                engine_url = _start_engine(processes, arguments.model_dir)
            with _step("starting a worker and the API"):
                settings = _settings(engine_url, arguments.model_dir, valkey.url)
                up.start(processes, settings)
            with _step(f"{arguments.agents} agents talk to the model, and {len(_BRANCHING)} that branch"):
                rollouts = asyncio.run(_play(up.api_url(settings), arguments.agents))
        return _report(rollouts, arguments.model_dir)
    except (EmbeddedValkeyError, ProcessEnded, TimeoutError) as error:
        last = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-_LOG_LINES:])
        print(f"{last}tokentape demo: {error}", file=sys.stderr)
        return 1


async def _play(url: str, agents: int) -> list[list[RolloutSample]]:
    """All episodes at once, each one session, one POST and one DELETE; the samples of each.

    What is left out is no warning here: the report says it.
    """

    async def line(index: int) -> list[RolloutSample]:
        agent = Agent(_QUESTIONS[index % len(_QUESTIONS)])
        return [await rollout(agent, RolloutSample(index=index), client=client, on_left_out="ignore")]

    async def tree(index: int, agent: Agent) -> list[RolloutSample]:
        sample = RolloutSample(index=index)
        return await rollout(agent, sample, client=client, mode="tree", on_left_out="ignore")

    async with TokentapeClient(url) as client:
        lines = [line(index) for index in range(agents)]
        trees = [tree(agents + i, branching()) for i, branching in enumerate(_BRANCHING)]
        return list(await asyncio.gather(*lines, *trees))


def _report(rollouts: list[list[RolloutSample]], model_dir: str) -> int:
    """Shows and verifies every sample; the exit code says whether all were right."""
    from tokentape_cli.demo.verify import TOLERANCE, load_model

    color = logs.wants_color(sys.stdout)
    tokenizer = Tokenizer.load(model_dir)
    model = load_model(model_dir)
    verified, worst = 0, 0.0
    print(f"\nEvery token of every sample: {legend(color)}.")
    samples = [sample for siblings in rollouts for sample in siblings]
    for sample in samples:
        print("\n" + show(sample, tokenizer, _title(sample), color=color))
        if sample.metadata.get("agent_error") or not any(sample.loss_mask or []):
            print(f"  not collected: {sample.metadata.get('agent_error') or sample.metadata}")
            continue
        found = verify(sample, model)
        is_right = found.largest <= TOLERANCE
        verified += is_right
        worst = max(worst, found.largest)
        print(
            f"  {'verified' if is_right else 'WRONG'}: {found.tokens} recomputed log-probs differ by at most "
            f"{found.largest:.1e} (allowed {TOLERANCE:.0e})"
        )
    for siblings in rollouts:
        if "tree" in siblings[0].metadata:
            print(f"\nThe tree of {_title(siblings[0]).partition(', leaf')[0]}\n{show_tree(siblings)}")
    tokens = sum(len(sample.tokens) for sample in samples)
    trained = sum(sum(sample.loss_mask or []) for sample in samples)
    fates: Counter[str] = Counter()
    for siblings in rollouts:
        if "accounting" in siblings[0].metadata:
            fates.update(Accounting.from_json(siblings[0].metadata["accounting"]).fates)
    sampled = fates.total()
    others = ", ".join(f"{count} {fate}" for fate, count in fates.items() if fate != TRAINED) or "none"
    calls = sum(siblings[0].metadata.get("tool_calls", 0) for siblings in rollouts)
    print(
        f"\n{verified} of {len(samples)} samples verified: {tokens} tokens, {calls} tool calls, largest "
        f"log-prob difference {worst:.1e}\n{trained} of {sampled} sampled tokens are trained, the others: "
        f"{others}"
    )
    return 0 if verified == len(samples) else 1


def _title(sample: RolloutSample) -> str:
    title = f"agent {sample.index}: {' / '.join(sample.metadata.get('questions', []))}"
    return f"{title}, leaf {sample.metadata['leaf']['node_id']}" if "leaf" in sample.metadata else title


def _start_engine(processes: Processes, model_dir: str) -> str:
    port = free_port()
    processes.start("engine", ["engine", "--port", str(port), "--model-dir", model_dir])
    url = f"http://127.0.0.1:{port}"
    processes.wait_until(lambda: "" if answers(f"{url}/health") else "the engine", _ENGINE_READY_S)
    return url


def _settings(engine_url: str, model_dir: str, redis_url: str) -> dict[str, Setting]:
    chosen = {
        "engine-url": engine_url,
        "tokenizer": model_dir,
        "family": "qwen3",
        "redis-url": redis_url,
        "port": free_port(),
        "log-format": "console",
    }
    defaults = {name: Setting(option.default, "default") for name, option in options.OPTIONS.items()}
    return {**defaults, **{name: Setting(value, "demo") for name, value in chosen.items()}}


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    began = time.monotonic()
    print(f"• {what} …", flush=True)
    yield
    print(f"  done in {time.monotonic() - began:.1f} s", flush=True)
