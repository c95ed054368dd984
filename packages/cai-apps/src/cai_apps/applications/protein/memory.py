"""Whether a machine could hold one sample of AlphaFold at all. What a run needs is for `cai plan` to say."""

from __future__ import annotations

from cai_apps.applications.protein.config import Config
from cai_apps.applications.protein.model.alphafold import Sizes
from cai_apps.config.memory import machine_bytes
from cai_apps.run.launch.devices import device_memory
from cai_mesh.errors import ConfigError

PAIRS = 8
"""Tensors of all pairs of residues that one block has at once, at least."""


def check_room(config: Config, sizes: Sizes, most: int | None = None) -> None:
    """Raise ConfigError where one microbatch is larger than all memory of the machine and of its GPU.

    Args:
        config: the config of a run.
        sizes: the sizes of its model.
        most: bytes that there are; None: those of this machine.
    """
    most = max(machine_bytes(), device_memory() or 0) if most is None else most
    needed = config.train.microbatch_size * sample_bytes(config, sizes)
    if needed > most:
        data = config.data
        raise ConfigError(
            "a microbatch of chains has no room in this machine",
            got=f"data.residues = {data.residues}, data.sequences = {data.sequences}, data.extra = {data.extra}, "
            f"data.templates = {data.templates}, objective.rounds = {config.objective.rounds}: "
            f"{needed / 2**30:,.0f} GiB at least",
            expected=f"at most {most / 2**30:,.0f} GiB",
            fix="lower them; `cai plan` says what a run needs",
        )


def sample_bytes(config: Config, sizes: Sizes) -> int:
    """Return the bytes of a sample's features, and of what one block makes of its pairs of residues, in float32."""
    data, pair = config.data, sizes.block.pair
    rows = data.sequences * (sizes.alignment + 1) + data.extra * (sizes.extra + 1)
    templates = 0 if sizes.template is None else data.templates * sizes.template.pair
    pairs = data.residues * (PAIRS * pair.c_z + templates)
    return 4 * data.residues * (config.objective.rounds * rows + pairs)
