"""What the other library has and this one does not, each with what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from cai_mesh.errors import ConfigError, did_you_mean

GALORE = (
    "cai_apps.compat.colossalai.nn.optimizer.Adafactor or CAME keep less state; GaLore itself is not here"
)
MODULES: Mapping[str, str] = {
    "auto_parallel": "`cai plan` says which degrees fit; HybridParallelPlugin runs them",
    "autochunk": "recompute: model.gradient_checkpointing_enable(), which boost follows",
    "device": "plugin.mesh is the mesh of torch's ranks",
    "fx": "boost divides models of transformers by their structure; nothing is traced",
    "gemini": "GeminiPlugin",
    "inference": "cai_apps.engine.LLM, or `cai generate`",
    "kernel": "kernels are put into a model by boost; cai_kernels has them as functions",
    "moe": "MoeHybridParallelPlugin(ep_size=...)",
    "legacy.builder": "build the objects of your config yourself",
    "legacy.nn": "modules of torch, which HybridParallelPlugin(tp_size=...) cuts",
    "legacy.pipeline": "HybridParallelPlugin(pp_size=...) with booster.execute_pipeline",
    "legacy.registry": "import the classes by name",
    "legacy.tensor": "cai_tensor_parallel.parallelize",
    "legacy.trainer": "a loop over engine: zero_grad, engine(data), engine.criterion, engine.backward, engine.step",
    "nn.layer": "layers of torch; boost puts kernels in their place on GPUs",
    "nn.parallel": "GeminiPlugin, LowLevelZeroPlugin with Booster",
    "quantization": "lora.base = 'nf4' of `cai train`",
    "shardformer.layer": "layers of torch, which boost or cai_tensor_parallel.parallelize cuts; of sharded logits "
    "cai_tensor_parallel.vocab_parallel_cross_entropy",
    "shardformer.policies": "leave custom_policy out: the plan is found from the model",
    "tensor": "plugin.mesh and cai_tensor_parallel.parallelize",
    "utils.model": "LazyInitContext of cai_apps.compat.colossalai.lazy",
    "testing": "cai_mesh.testing.run_ranks runs a function on ranks",
}
"""Modules, without the library's name."""


class AbsentError(ConfigError, ImportError):
    """A name of the other library that is not here; the message has what to write instead."""


def raise_absent(module: str, name: str, instead: str) -> NoReturn:
    """Raise the AbsentError of a name."""
    path = ".".join(part for part in ("colossalai", module, name) if part)
    raise AbsentError(f"{path} is not here", fix=f"instead: {instead}")


def answer(module: str, absent: Mapping[str, str], present: Any) -> Any:
    """Return a module's `__getattr__`, which says what to write in place of a name that is not here.

    Args:
        module: the module's path in the other library, without the library's name.
        absent: names that it has there -> what to write instead.
        present: names that are here.
    """

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in absent:
            raise_absent(module, name, absent[name])
        raise AttributeError(f"colossalai.{module} has no {name!r} here: {did_you_mean(name, present)}")

    return find


def refuse(module: str) -> Any:
    """Return the `__getattr__` of a module that is not here: whoever asks it for anything is told what to write.

    Args:
        module: the module's path in the other library, without the library's name.
    """

    def find(name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # asked for by an import of what lies in it
            raise AttributeError(name)
        raise_absent(module, "", MODULES[module])

    return find
