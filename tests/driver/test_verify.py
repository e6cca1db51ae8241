"""`verify`: what was really sampled passes, every fault is seen, and the model stays as it was."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tokentape_driver import RolloutSample, verify

TOLERANCE = 1e-4
VOCABULARY = 200
EXPERTS, TOP_K = 8, 2
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def dense_model() -> Any:
    torch.manual_seed(1)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**SIZE))
    return model.eval()


def moe_model(**changes: Any) -> Any:
    torch.manual_seed(2)
    mixture = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 48}
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZE, **mixture, **changes}))
    return model.eval()


def routers(model: Any) -> list[Any]:
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def play(model: Any, *, temperature: float = 1.0, chosen_by: str = "router") -> RolloutSample:
    """Two turns with tokens of the environment between them, decoded one by one with a KV cache.

    Args:
        chosen_by: the model's "router", or "chance", which may agree with it.
    """
    dice = torch.Generator().manual_seed(3)
    choices: list[list[torch.Tensor]] = [[] for _ in routers(model)]

    def watch(layer: int) -> Callable[..., Any]:
        def hook(router: Any, _inputs: Any, output: Any) -> Any:
            logits, weights, chosen = output
            if chosen_by == "chance":
                order = torch.rand(logits.shape, generator=dice).argsort(-1)
                chosen = order[:, :TOP_K]
                weights = logits.softmax(-1).take_along_dim(chosen, 1)
                if model.config.norm_topk_prob:
                    weights = weights / weights.sum(-1, keepdim=True)
            choices[layer].append(chosen)
            return logits, weights, chosen

        return hook

    tokens = torch.randint(VOCABULARY, (9,), generator=dice).tolist()
    prompt, mask, log_probs, cache = len(tokens), [], [], DynamicCache(config=model.config)
    with ExitStack() as hooks, torch.no_grad():
        for layer, router in enumerate(routers(model)):
            hooks.enter_context(router.register_forward_hook(watch(layer)))
        for turn in range(2):
            for _ in range(12):
                unread = torch.tensor([tokens[cache.get_seq_length() :]])
                logits = model(unread, None, None, cache, use_cache=True).logits[0, -1] / temperature
                tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=dice)))
                log_probs.append(float(logits.log_softmax(-1)[tokens[-1]]))
                mask.append(1)
            if turn == 0:
                inserted = torch.randint(VOCABULARY, (5,), generator=dice).tolist()
                tokens, mask, log_probs = tokens + inserted, mask + [0] * 5, log_probs + [0.0] * 5
    experts = np.stack([torch.cat(rows).numpy() for rows in choices], 1) if choices else None
    return RolloutSample(
        tokens=tokens,
        response_length=len(tokens) - prompt,
        loss_mask=mask,
        rollout_log_probs=log_probs,
        rollout_routed_experts=None if experts is None else experts.astype(np.int32),
    )


@pytest.fixture(scope="module")
def dense() -> Any:
    return dense_model()


@pytest.fixture(scope="module")
def moe() -> Any:
    return moe_model()


@pytest.fixture(scope="module")
def played(moe: Any) -> RolloutSample:
    """A sample of the mixture of experts; copy it before you change it."""
    return play(moe)


def routing(sample: RolloutSample) -> Any:
    assert sample.rollout_routed_experts is not None
    return sample.rollout_routed_experts


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_dense(dense: Any, temperature: float) -> None:
    """A dense model's sample passes at its temperature; only what was sampled is compared."""
    sample = play(dense, temperature=temperature)
    found = verify(sample, dense, temperature=temperature)
    assert 0 <= found.mean <= found.largest < TOLERANCE
    assert found.tokens == 24
    assert sample.loss_mask is not None
    assert sample.loss_mask[found.worst - 9] == 1
    assert found.routing_changed is found.routing_total is None


def test_long_samples(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rows of logits are taken at a time changes nothing."""
    sample = play(dense)
    at_once = verify(sample, dense)
    monkeypatch.setattr(sys.modules["tokentape_driver.verify"], "_ROWS_AT_ONCE", 5)
    assert verify(sample, dense) == at_once


@pytest.mark.parametrize("normalised", [True, False])
def test_routing_that_is_the_routers_own(normalised: bool) -> None:
    """A mixture's sample passes, and its routers choose under teacher forcing what was recorded."""
    model = moe_model(norm_topk_prob=normalised)
    sample = play(model)
    found = verify(sample, model)
    assert found.largest < TOLERANCE
    assert (found.routing_changed, found.routing_total) == (0, (len(sample.tokens) - 1) * 2)
    assert verify(sample, model, replay_routing=False).largest < TOLERANCE


@pytest.mark.parametrize("normalised", [True, False])
def test_routing_that_differs_is_replayed(normalised: bool) -> None:
    """Experts that the router would not have chosen are used all the same; without them the sample fails."""
    model = moe_model(norm_topk_prob=normalised)
    sample = play(model, chosen_by="chance")
    found = verify(sample, model)
    assert found.largest < TOLERANCE
    assert found.routing_changed is not None
    assert found.routing_total is not None
    assert found.routing_total / 2 < found.routing_changed <= found.routing_total
    without = verify(sample, model, replay_routing=False)
    assert without.largest > TOLERANCE
    assert without.routing_changed is None


def test_routing_is_compared_as_sets(moe: Any, played: RolloutSample) -> None:
    """The order in which an engine names the experts of a token does not matter."""
    sample = deepcopy(played)
    sample.rollout_routed_experts = np.ascontiguousarray(routing(sample)[..., ::-1])
    found = verify(sample, moe)
    assert found.largest < TOLERANCE
    assert found.routing_changed == 0


@pytest.mark.parametrize("recorded", ["sparse layers", "all layers"])
def test_dense_layers_among_sparse_ones(recorded: str) -> None:
    """Routing may be recorded for the layers with a router or for all; a dense layer's rows are not read."""
    model = moe_model(num_hidden_layers=4, mlp_only_layers=[0, 2])
    sample = play(model, chosen_by="chance")
    sparse = routing(sample)
    if recorded == "all layers":
        nothing = np.full_like(sparse[:, 0], -1)
        sample.rollout_routed_experts = np.stack([nothing, sparse[:, 0], nothing, sparse[:, 1]], 1)
    found = verify(sample, model)
    assert found.largest < TOLERANCE
    assert found.routing_total == (len(sample.tokens) - 1) * 2


def change_token(sample: RolloutSample) -> None:
    sample.tokens[4] = (sample.tokens[4] + 1) % VOCABULARY


def lose_token(sample: RolloutSample) -> None:
    del sample.tokens[4]
    if sample.rollout_routed_experts is not None:
        sample.rollout_routed_experts = np.delete(sample.rollout_routed_experts, 4, 0)


def shift_log_probs(sample: RolloutSample) -> None:
    sample.rollout_log_probs = np.roll(sample.rollout_log_probs or [], 1).tolist()


def shift_mask(sample: RolloutSample) -> None:
    sample.loss_mask = np.roll(sample.loss_mask or [], 1).tolist()


def shift_routing(sample: RolloutSample) -> None:
    sample.rollout_routed_experts = np.roll(routing(sample), 1, 0)


def swap_layers(sample: RolloutSample) -> None:
    sample.rollout_routed_experts = np.ascontiguousarray(routing(sample)[:, ::-1])


FAULTS = [change_token, lose_token, shift_log_probs, shift_mask]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(dense: Any, fault: Callable[[RolloutSample], None]) -> None:
    """One token changed or lost, or log-probs or mask off by one: far above the tolerance."""
    sample = play(dense)
    fault(sample)
    assert verify(sample, dense).largest > 10 * TOLERANCE


@pytest.mark.parametrize("fault", [*FAULTS, shift_routing, swap_layers])
def test_faults_with_routing_are_seen(
    moe: Any, played: RolloutSample, fault: Callable[[RolloutSample], None]
) -> None:
    """The same with replayed routing, and for routing off by a row or with its layers in another order."""
    sample = deepcopy(played)
    fault(sample)
    found = verify(sample, moe)
    assert found.largest > 10 * TOLERANCE
    if fault in (shift_routing, swap_layers):
        assert found.routing_changed


@pytest.mark.parametrize("temperature", [0.7, 1.01])
def test_a_wrong_temperature_is_seen(dense: Any, temperature: float) -> None:
    """Log-probs at another temperature, even one a hundredth off, are above the tolerance."""
    assert verify(play(dense, temperature=temperature), dense).largest > 10 * TOLERANCE


def test_the_worst_token_is_named(dense: Any) -> None:
    """`worst` is a position in `tokens`, and `largest` and `mean` are in nats."""
    sample = play(dense)
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs[20] -= 2.4
    found = verify(sample, dense)
    assert found.worst == 9 + 20
    assert found.largest == pytest.approx(2.4, abs=TOLERANCE)
    assert found.mean == pytest.approx(0.1, abs=TOLERANCE)


def test_half_precision(played: RolloutSample) -> None:
    """A bfloat16 model computes in its dtype and passes more widely; the softmax is finer than bfloat16."""
    model = moe_model().to(torch.bfloat16)
    found = verify(play(model), model)
    assert found.largest < 0.5
    assert verify(played, model).largest > TOLERANCE


def state_of(model: Any) -> list[Any]:
    return [
        (module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
        for module in model.modules()
    ]


def test_the_model_stays_as_it_was(played: RolloutSample) -> None:
    """A model in training verifies without dropout; its modules keep their modes, hooks are gone."""
    model = moe_model(attention_dropout=0.5).train()
    model.lm_head.eval()
    before = state_of(model)
    assert verify(played, model).largest < TOLERANCE
    assert state_of(model) == before
    assert model.lm_head.weight.requires_grad


def test_the_model_stays_as_it_was_after_an_error(played: RolloutSample) -> None:
    """An error in the pass, and one before it, leave no hook and no other mode behind."""
    model = moe_model().train()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    model.lm_head.register_forward_pre_hook(fail)
    before = state_of(model)
    with pytest.raises(RuntimeError, match="out of memory"):
        verify(played, model)
    with pytest.raises(ValueError, match="positive"):
        verify(played, model, temperature=0.0)
    assert state_of(model) == before


def test_routers_that_are_not_called(played: RolloutSample) -> None:
    """A model whose layers go by their router, as fused kernels may, is refused: nothing was replayed."""
    model = moe_model()
    model.model.layers[1].mlp.forward = lambda hidden: hidden
    with pytest.raises(ValueError, match="called its routers 1 times, not 2"):
        verify(played, model)


def test_routing_without_routers(dense: Any, played: RolloutSample) -> None:
    """Routing that the model cannot use is refused, unless it is left out on purpose."""
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no Qwen3MoeTopKRouter"):
        verify(played, dense)
    assert verify(played, dense, replay_routing=False).largest > TOLERANCE


ROWS = 9 + 12 + 5 + 12 - 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda e: e[1:], rf"has shape \(36, 2, 2\); 38 tokens and this model need \[{ROWS}, 2, 2\]"),
        (lambda e: e[:, :1], r"shape \(37, 1, 2\)"),
        (lambda e: e[..., :1], r"shape \(37, 2, 1\)"),
        (lambda e: e.reshape(-1), r"shape \(148,\)"),
        (lambda e: np.where(e == e[3, 1, 0], 8, e), "an id outside 0 to 7 in row"),
        (lambda e: np.where(e == e[0, 1, 0], -1, e), "an id outside 0 to 7 in row 0, layer "),
        (lambda e: np.zeros_like(e), r"an expert twice in row 0, layer 0: \[0, 0\]"),
    ],
)
def test_routing_that_does_not_fit(
    moe: Any, played: RolloutSample, change: Callable[[Any], Any], match: str
) -> None:
    """Routing of another shape, with unknown experts, or with one expert twice is refused, and quoted."""
    sample = deepcopy(played)
    sample.rollout_routed_experts = change(routing(played))
    with pytest.raises(ValueError, match=f"rollout_routed_experts .*{match}"):
        verify(sample, moe)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"response_length": 0, "loss_mask": None, "rollout_log_probs": None}, "nothing to verify"),
        ({"loss_mask": [0] * 29}, "nothing to verify"),
        ({"loss_mask": [1]}, "loss_mask must have response_length = 29 values"),
        ({"response_length": 38, "loss_mask": [1] * 38, "rollout_log_probs": [0.0] * 38}, "token 0"),
    ],
)
def test_samples_that_cannot_be_verified(
    moe: Any, played: RolloutSample, changes: dict[str, Any], match: str
) -> None:
    """Nothing sampled, lengths that do not fit, and a first token that nothing predicts are refused."""
    with pytest.raises(ValueError, match=match):
        verify(RolloutSample(**{**vars(played), **changes}), moe)


def test_without_torch(monkeypatch: pytest.MonkeyPatch, moe: Any, played: RolloutSample) -> None:
    """Without torch the error names the extra to install."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"verify needs torch.*pip install '\.\[torch\]' in a clone"):
        verify(played, moe)
