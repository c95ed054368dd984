"""Preference losses as small functions of log-probabilities, and the chunked way there from hidden states.

    dpo = -log sigmoid(beta (log p(c) / ref(c) - log p(r) / ref(r)))

c is the chosen response, r the rejected one, ref the reference model; the other losses stand in their files.
The one heavy operation is `linear_log_probs`: logits exist a chunk of tokens at a time, forward and backward, so
memory is bounded by `chunk_bytes` however many tokens there are. The losses see one number a token or a sequence.
With targets one place ahead of the hidden states and -100 where there is no response:

    target = F.pad(labels[:, 1:], (0, 1), value=-100)              # no copy of the hidden states
    both = linear_sequence_log_probs(hidden, head.weight, target)  # [2N]: chosen responses, then rejected ones
    with torch.no_grad():
        ref = linear_sequence_log_probs(ref_hidden, ref_head.weight, target)
    loss, metrics = dpo_loss(*both.chunk(2), *ref.chunk(2), beta=0.1)

ORPO and SimPO compare averages over tokens (`average=True`); GRPO wants the tokens themselves, and may want entropies:

    log_probs, entropy = linear_log_probs(hidden, head.weight, target, entropy=True)  # [N, T] each
    loss, metrics = grpo_loss(log_probs, old_log_probs, advantages, target != -100, normalize="tokens")
"""

from cai_kernels.preference.grpo import GrpoMetrics, grpo_loss
from cai_kernels.preference.kto import KtoMetrics, kto_loss
from cai_kernels.preference.pairs import (
    DpoForm,
    PreferenceMetrics,
    dpo_loss,
    orpo_loss,
    reward_loss,
    simpo_loss,
)
from cai_kernels.preference.sequences import linear_sequence_log_probs, sequence_log_probs

__all__ = [
    "DpoForm",
    "GrpoMetrics",
    "KtoMetrics",
    "PreferenceMetrics",
    "dpo_loss",
    "grpo_loss",
    "kto_loss",
    "linear_sequence_log_probs",
    "orpo_loss",
    "reward_loss",
    "sequence_log_probs",
    "simpo_loss",
]
