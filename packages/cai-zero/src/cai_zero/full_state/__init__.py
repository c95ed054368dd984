"""Full tensors from parts and back: complete state dicts on one rank, of models and of their optimizers.

For code that knows nothing of shards: `save_pretrained`, peft's adapters, `torch.save`. A checkpoint to resume from is
`cai_mesh.checkpoint.save`, and a directory of safetensors `cai_mesh.checkpoint.save_hf`; neither gathers anything.
"""

from cai_zero.full_state.optimizer import full_optimizer_state_dict, load_full_optimizer_state_dict
from cai_zero.full_state.weights import full_state_dict, load_full_state_dict

__all__ = [
    "full_optimizer_state_dict",
    "full_state_dict",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
]
