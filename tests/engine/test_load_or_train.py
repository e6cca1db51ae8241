"""A model directory is whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokentape_engine import server
from tokentape_engine.model import TinyModel
from tokentape_engine.server import load_or_train
from tokentape_engine.training import loss, train


def test_second_start_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start trains and saves, the second loads what the first saved."""
    first = load_or_train(tmp_path / "deep" / "model", train_steps=0, seed=3)
    monkeypatch.setattr(server, "train", lambda *_: pytest.fail("trained twice"))
    second = load_or_train(tmp_path / "deep" / "model", train_steps=0, seed=4)
    assert first.network.lm_head.weight.equal(second.network.lm_head.weight)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model"]


def test_what_comes_trained_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model is taken from the package."""
    monkeypatch.setattr(server, "train", lambda *_: pytest.fail("trained"))
    loaded = load_or_train(tmp_path / "model")
    assert loaded.network.lm_head.weight.equal(TinyModel.trained().network.lm_head.weight)
    assert not loaded.network.lm_head.weight.equal(TinyModel.create().network.lm_head.weight)


def test_the_trained_weights_fit() -> None:
    """The weights in the package belong to the dialogues, the tokenizer and the template of today."""
    model, untrained = TinyModel.trained(), TinyModel.create()
    with torch.no_grad():
        assert loss(model) < 0.15, "run scripts/train-reference-model"
        assert loss(untrained) > 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_fits() -> None:
    """The default training leads to weights as good as those in the package."""
    model = TinyModel.create()
    train(model)
    with torch.no_grad():
        assert loss(model) == pytest.approx(loss(TinyModel.trained()), abs=0.05)


def test_race_is_won_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When another process finishes first, its model is used and ours is removed."""
    folder = tmp_path / "model"
    winner = TinyModel.create(seed=5)
    monkeypatch.setattr(server, "train", lambda *_: winner.save(folder))
    loaded = load_or_train(folder, train_steps=0, seed=6)
    assert loaded.network.lm_head.weight.equal(winner.network.lm_head.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    """A directory with other files is an error, and keeps them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        load_or_train(tmp_path / "model", train_steps=0)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["notes.txt"]


def test_directory_decides_the_kind(tmp_path: Path) -> None:
    """A saved model is loaded as the kind that it is; a start that insists on the other kind is an error."""
    first = load_or_train(tmp_path / "model", train_steps=0, kind="moe")
    second = load_or_train(tmp_path / "model")
    assert (first.kind, second.kind) == ("moe", "moe")
    assert second.network.config.architectures == ["Qwen3MoeForCausalLM"]
    with pytest.raises(ValueError, match="holds a moe model, not a dense one"):
        load_or_train(tmp_path / "model", kind="dense")


def test_experts_learn(capsys: pytest.CaptureFixture[str]) -> None:
    """Training reaches a MoE model too: one step moves every weight, the routers' included."""
    model = TinyModel.create(kind="moe")
    before = {name: weights.clone() for name, weights in model.network.named_parameters()}
    train(model, steps=1)
    assert "step 1/1" in capsys.readouterr().err
    assert not any(weights.equal(before[name]) for name, weights in model.network.named_parameters())
