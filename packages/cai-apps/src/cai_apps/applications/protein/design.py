"""Sizes of the models that ship, and how their parts are initialized and divided into layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from cai_apps.applications.protein.config import Config
from cai_apps.applications.protein.model.alphafold import AlphaFold, Sizes
from cai_apps.applications.protein.model.evoformer import BlockSizes, PairSizes
from cai_apps.applications.protein.model.layers import initialize
from cai_apps.applications.protein.model.points import ONE, PointAttention
from cai_apps.applications.protein.model.structure import StructureSizes
from cai_apps.applications.protein.model.template import TemplateSizes
from cai_apps.applications.protein.rules import check_name


def _sizes(c_m: int, c_z: int, c_s: int, blocks: int, *, dropout: float) -> Sizes:
    """A model of fewer features and blocks than AlphaFold's."""
    pair = PairSizes(c_z=c_z, triangle=c_z, heads=4, head=c_z // 4, factor=2, dropout=dropout)
    block = BlockSizes(c_m=c_m, heads=4, head=c_m // 4, outer=c_m // 4, factor=2, dropout=dropout, pair=pair)
    extra = BlockSizes(
        c_m=c_m // 2, heads=4, head=8, outer=8, factor=2, dropout=dropout, one_query=True, pair=pair
    )
    small = PairSizes(c_z=c_z // 2, triangle=c_z // 2, heads=2, head=c_z // 4, factor=2, dropout=dropout)
    return Sizes(
        block=block,
        blocks=blocks,
        extra_block=extra,
        extra_blocks=1,
        template=TemplateSizes(blocks=1, sizes=small, heads=2, head=8),
        structure=StructureSizes(
            c_s=c_s, c_z=c_z, head=c_s // 8, heads=4, blocks=4, dropout=dropout, angles=c_s
        ),
    )


PRESETS: dict[str, Callable[[], Sizes]] = {
    "alphafold": Sizes,
    "alphafold-small": lambda: _sizes(128, 64, 128, 6, dropout=0.0),
    "alphafold-tiny": lambda: _sizes(32, 32, 32, 2, dropout=0.0),
}


def sizes_of(name: str, *, templates: bool, errors: bool) -> Sizes:
    """Return the sizes of a preset.

    Args:
        templates: whether any are read.
        errors: whether aligned errors are predicted.

    Raises `ConfigError` for a name that is none.
    """
    check_name(name)
    sizes = replace(PRESETS[name](), errors=errors)
    return sizes if templates else replace(sizes, template=None)


def sizes_for(config: Config) -> Sizes:
    """Return the sizes of a run's model."""
    return sizes_of(config.model.name, templates=config.data.templates > 0, errors=config.model.errors)


def initializer(model: nn.Module) -> Callable[[nn.Module], None]:
    """What fills the parameters of one module of an `AlphaFold`: section 1.11.4."""

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            initialize(module, module.initial)  # type: ignore[arg-type]
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, PointAttention):
            nn.init.constant_(module.weight, ONE)

    return fill


def compiled_methods(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The block of the structure module: hundreds of operators on little data, several times a round."""
    assert isinstance(model, AlphaFold)
    return [(model.structure, "block")]


def layers(model: nn.Module) -> list[nn.Module]:
    """Blocks of the trunk, of the stack for extra sequences, and of that for templates."""
    assert isinstance(model, AlphaFold)
    stacks = [model.extra_stack.blocks, model.evoformer.blocks]
    if model.template is not None:
        stacks.insert(0, model.template.blocks)
    return [block for stack in stacks for block in stack]
