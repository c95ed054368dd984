"""What the objective measures, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from cai_apps.applications.alignment.config import Alignment
from cai_apps.applications.alignment.objective import Objective, measures_of
from cai_apps.applications.alignment.scores import Scorer
from cai_apps.compose.losses import NextTokenLoss
from cai_tensor_parallel import ShardedLogits


def test_a_reward_model_says_how_sure_it_is():
    options = Alignment(algorithm="reward")
    values = torch.tensor([[0.0, 2.0, 0.0, 1.0, 9.0, -1.0, 9.0, 0.5]])  # two pairs of two tokens an answer
    rows = {
        "labels": torch.full((1, 8), -100),
        "scored": torch.zeros(1, 0, dtype=torch.int64),
        "cu_seqlens": torch.tensor([[0, 2, 4, 6, 8, 8]], dtype=torch.int32),
        "present": torch.tensor([[True, True]]),
        "margin": torch.zeros(1, 2),
    }
    objective = Objective(options, Scorer(NextTokenLoss(ShardedLogits()), "value"))
    loss, sums = objective.measured(SimpleNamespace(logits=values[..., None]), rows)
    means = dict(zip(measures_of(options), (sums[0] / sums[1]).tolist(), strict=True))

    def sigmoid(margin: float) -> float:
        return 1 / (1 + math.exp(-margin))

    assert float(loss) == pytest.approx(-math.log(sigmoid(1.0)) - math.log(sigmoid(-1.5)), rel=1e-6)
    assert means["rewards/accuracies"] == 0.5 and means["rewards/margins"] == pytest.approx(-0.25)
    assert means["rewards/confidence"] == pytest.approx((sigmoid(1.0) + sigmoid(1.5)) / 2)
