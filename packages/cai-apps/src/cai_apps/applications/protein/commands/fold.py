"""cai fold MODEL INPUT"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import tyro

from cai_apps.applications.protein import need_gemmi
from cai_apps.config.arguments import parse
from cai_apps.config.ranges import COUNT, SEED, Range
from cai_apps.run.files.directory import RunDirectory
from cai_mesh.errors import ConfigError, DataError

if TYPE_CHECKING:
    from cai_apps.applications.protein.data.sequences import Alignment
    from cai_apps.applications.protein.data.templates import Template
    from cai_apps.applications.protein.model.alphafold import AlphaFold

MOST = 4
"""Templates that are read."""


@dataclass(frozen=True)
class Arguments:
    """Fold chains: mmCIF with the confidence where B factors are, and the expected aligned errors as JSON."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run directory with an export, an export, or a file of weights: OpenFold's (.pt), AlphaFold's (.npz)."""
    input: Annotated[Path, tyro.conf.Positional]
    """An alignment (.a3m, .sto) whose first sequence is folded, or sequences (.fasta, .fa), each folded by itself."""
    output: Path = Path("folded")
    """Directory for NAME.cif and NAME.pae.json."""
    preset: str = "alphafold"
    """The model that a file of weights is of."""
    rounds: Annotated[int, Range(least=1, most=1000)] = 4
    """One after the other, each from what the one before found (recycling)."""
    sequences: Annotated[int, COUNT] = 512
    """Sequences of the alignment that lead clusters."""
    extra: Annotated[int, COUNT] = 1024
    """Other sequences of the alignment."""
    templates: tuple[str, ...] = ()
    """Related structures for a model that reads them: files, each FILE or FILE:CHAIN; or one .hhr of HHsearch."""
    template_structures: Path | None = None
    """Directory with the structures that an .hhr names; that of the .hhr unless given."""
    raw: bool = False
    """Use the last weights, where averaged ones are there too."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """The dtype of computing. auto: bf16 on a GPU that has it, else fp32; coordinates are float32 always."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Annotated[int, SEED] = 0
    """The seed that decides which sequences lead clusters, and what is masked."""


def run(arguments: list[str]) -> int:
    options = parse(Arguments, arguments, command="fold")
    need_gemmi()
    if not options.input.is_file():
        raise DataError(f"no file {options.input}", expected="an alignment or sequences")
    chains = list(_chains(options.input))
    if options.templates and len(chains) > 1:
        raise ConfigError("templates are of one chain", got=f"{len(chains)} in {options.input}")
    templates = _templates(options, chains[0][1])
    model = _model(options)
    if templates and model.template is None:
        raise ConfigError(
            f"{options.model} reads no templates",
            cause="weights of models 3 to 5, or a run with data.templates = 0",
            fix="leave --templates out",
        )
    _fold(options, model, chains, templates)
    return 0


def _chains(path: Path) -> Iterator[tuple[str, Alignment]]:
    """Names, as files will have them, and alignments."""
    from cai_apps.applications.protein.data.chains import ALIGNMENTS
    from cai_apps.applications.protein.data.sequences import numbers_of, read_fasta
    from cai_apps.applications.protein.fold import alone

    if path.suffix in ALIGNMENTS:
        yield path.stem, ALIGNMENTS[path.suffix](path)
        return
    if path.suffix not in (".fasta", ".fa", ".faa"):
        raise DataError(
            f"{path} is of no known kind",
            expected=f"{', '.join(ALIGNMENTS)}, .fasta or .fa",
            fix="rename it by what it holds",
        )
    entries = read_fasta(path)
    short_names = file_names([name for name, _ in entries], path.stem)
    for number, (short, (name, sequence)) in enumerate(zip(short_names, entries, strict=True), 1):
        yield short, alone(short, numbers_of(sequence, f"sequence {number} ({name}) of {path}"))


def file_names(names: Sequence[str], otherwise: str) -> list[str]:
    """Return a name for the files of each sequence: its first word, with a number where another has that already.

    Args:
        names: the names of sequences.
        otherwise: the name of those that have none.
    """
    firsts = [(name.split() or [""])[0][:60] for name in names]
    words = ["".join(c if c.isalnum() or c in "-." else "_" for c in first) or otherwise for first in firsts]
    reserved, used, chosen = {word.casefold() for word in words}, set[str](), list[str]()
    for number, word in enumerate(words, 1):  # file systems may not tell A from a
        if word.casefold() in used:
            numbered = (f"{word}_{n}" for n in count(number))
            word = next(name for name in numbered if name.casefold() not in reserved)
            reserved.add(word.casefold())
        used.add(word.casefold())
        chosen.append(word)
    return chosen


def _model(options: Arguments) -> AlphaFold:
    from cai_apps.applications.protein.design import sizes_of
    from cai_apps.applications.protein.export import load_export
    from cai_apps.applications.protein.model.alphafold import AlphaFold
    from cai_apps.applications.protein.weights import parts_of, read_weights

    if options.model.is_dir():
        run = RunDirectory(options.model)
        return load_export(run.export if run.config_file.is_file() else options.model, raw=options.raw)
    parts = parts_of(options.model)
    model = AlphaFold(sizes_of(options.preset, templates=parts.templates, errors=parts.errors))
    read_weights(model, options.model)
    return model.eval()


def _templates(options: Arguments, alignment: Alignment) -> list[Template]:
    """Return the templates of the first sequence, and print which hits of a search are left out."""
    from cai_apps.applications.protein.data.hhr import read_hhr
    from cai_apps.applications.protein.data.related import choose, given
    from cai_apps.applications.protein.data.structures import read_chain

    query = alignment.residues[0].astype(np.int64)
    if not options.templates:
        return []
    first = Path(options.templates[0])
    if first.suffix == ".hhr":
        chosen = choose(query, read_hhr(first), options.template_structures or first.parent, most=MOST)
        for hit, reason in chosen.dropped:
            print(f"template {hit.name} is left out: {reason}", flush=True)
        return chosen.templates
    files = [name.rpartition(":") for name in options.templates]
    named = [(Path(file), chain) if file else (Path(chain), None) for file, _, chain in files]
    return given(query, [read_chain(file, chain) for file, chain in named])


def _fold(
    options: Arguments, model: AlphaFold, chains: list[tuple[str, Alignment]], templates: list[Template]
) -> None:
    import torch

    from cai_apps.applications.protein.fold import Options, fold
    from cai_apps.applications.protein.needs import available, check_needs, needs_of
    from cai_apps.run.launch.devices import choose_device

    device, _ = choose_device(options.device, 1)
    bf16 = options.dtype == "bf16" or (
        options.dtype == "auto" and device == "cuda" and torch.cuda.is_bf16_supported()
    )
    model = model.to(torch.bfloat16 if bf16 else torch.float32)
    how = Options(options.rounds, options.sequences, options.extra, MOST, seed=options.seed)
    name, alignment = max(chains, key=lambda chain: chain[1].residues.shape[::-1])
    rows, count = alignment.residues.shape
    what = f"{count:,} residues and {rows:,} sequence{'s' * (rows > 1)} in {'bf16' if bf16 else 'fp32'} on {device}"
    needs = needs_of(model, alignment, how, templates, device)
    print(check_needs(name, needs, available(device), what), flush=True)
    model = model.to(device)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, alignment in chains:
        prediction = fold(model, name, alignment, how, templates)
        files = prediction.write(options.output / f"{name}.cif")
        tm = "" if prediction.tm is None else f", expected TM-score {prediction.tm:.2f}"
        sequences = len(alignment.residues)
        print(
            f"{name}: {len(alignment.residues[0])} residues, {sequences} sequence{'s' * (sequences > 1)}, "
            f"confidence {prediction.plddt.mean():.1f} of 100{tm}: {', '.join(map(str, files))}",
            flush=True,
        )
