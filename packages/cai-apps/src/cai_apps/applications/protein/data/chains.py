"""Chains that are trained on: read from files once, kept as arrays.

    <cache>/<key>/NAME.npz      arrays of one chain: its alignment and its structure

The key is a digest of the bytes of all files that a chain is read from, so a kept one is never out of date.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from cai_apps.applications.protein.config import Data
from cai_apps.applications.protein.data.examples import check_pair
from cai_apps.applications.protein.data.hhr import Hit, read_hhr
from cai_apps.applications.protein.data.related import choose, released, structures_of
from cai_apps.applications.protein.data.sequences import Alignment, read_a3m, read_stockholm
from cai_apps.applications.protein.data.structures import Chain, read_chain
from cai_apps.applications.protein.data.templates import Template
from cai_apps.config.places import check_regular
from cai_apps.data.content import digest_of_files
from cai_mesh.errors import ConfigError, DataError, did_you_mean
from cai_mesh.files import private_folder, replaced

FORMAT = 3
"""The format of what is kept; with another one all of it is made anew."""
ALIGNMENTS = {".a3m": read_a3m, ".sto": read_stockholm}
STRUCTURES = (".cif", ".pdb")
SHIPPED = "shipped"


@dataclass(frozen=True)
class Files:
    """What one chain is read from.

    Args:
        name: the name of the chain.
        alignment, structure: files.
        chain: its name in the structure; None: the only protein there.
        hits: related structures; None: none are known.
    """

    name: str
    alignment: Path
    structure: Path
    chain: str | None
    hits: Path | None


@dataclass(frozen=True)
class Prepared:
    """Chains on disk.

    Args:
        training: the files of the chains that are trained on, by name.
        validation: the same of those that validate.
        content: digest of what all of them were read from.
    """

    training: dict[str, Path]
    validation: dict[str, Path]
    content: str

    def file(self, name: str) -> Path:
        """Return the file of a chain. Raises `ConfigError` for a name that is none."""
        every = self.training | self.validation
        if name not in every:
            raise ConfigError(
                f"no chain {name!r} in the data", expected=", ".join(every), fix=did_you_mean(name, every)
            )
        return every[name]


def directory_of(source: str) -> Path:
    """Where the files of a source are. Raises `DataError` where there is no such directory."""
    path = Path(str(files(__package__) / SHIPPED)) if source == SHIPPED else Path(source).expanduser()
    if not path.is_dir():
        raise DataError(f"no directory {path}", expected="alignments NAME.a3m beside structures NAME.cif")
    return path


def found_in(directory: Path) -> list[Files]:
    """The chains of a directory, by name.

    Raises `DataError` for a directory without alignments, an alignment without a structure, or a chain with two.
    """
    files_by_chain: dict[str, Files] = {}
    for path in sorted(p for p in directory.iterdir() if p.suffix in ALIGNMENTS):
        check_regular(path)
        if path.stem in files_by_chain:
            raise DataError(
                f"two alignments of {path.stem}",
                got=f"{files_by_chain[path.stem].alignment.name}, {path.name}",
            )
        structure, chain = _structure(directory, path.stem)
        hits = path.with_suffix(".hhr")
        files_by_chain[path.stem] = Files(path.stem, path, structure, chain, hits if hits.is_file() else None)
    if not files_by_chain:
        raise DataError(f"no alignments in {directory}", expected=f"files of {', '.join(ALIGNMENTS)}")
    return list(files_by_chain.values())


def _structure(directory: Path, name: str) -> tuple[Path, str | None]:
    entry, _, chain = name.rpartition("_")
    tried = [(name, None), *([(entry, chain)] if entry else [])]
    for stem, of in tried:
        for suffix in STRUCTURES:
            if (path := directory / f"{stem}{suffix}").is_file():
                return path, of
    raise DataError(
        f"no structure of {name} in {directory}",
        expected=" or ".join(f"{stem}{STRUCTURES[0]}" for stem, _ in tried),
        fix="put it there, or take the alignment away",
    )


def prepare(data: Data) -> Prepared:
    """Read all chains of a source, unless they were read before.

    Raises `DataError` for damaged files, and where no chain is left to train on.
    """
    cache = private_folder(Path(data.cache), "data.cache") / "chains"
    private_folder(cache, "a directory of data.cache")
    cached_paths: dict[str, Path] = {}
    contents: dict[str, str] = {}
    directory = directory_of(data.source)
    related = Path(data.template_structures).expanduser() if data.template_structures else directory
    chains = found_in(directory)
    if data.templates and not any(chain.hits for chain in chains):
        raise DataError(
            f"data.templates = {data.templates}, but no chain of {data.source} has related structures",
            expected="NAME.hhr of HHsearch beside NAME.a3m",
            fix="put them there, or set data.templates to 0",
        )
    for chain in chains:
        contents[chain.name] = _content(chain, related if data.templates else None, data.cache)
        path = _kept(chain, cache, contents[chain.name], related if data.templates else None)
        with np.load(path, allow_pickle=False) as arrays:
            if float(arrays["resolution"]) <= data.max_resolution:
                cached_paths[chain.name] = path
    if data.templates:
        _check_templates(data, cached_paths)
    for name in data.validation:
        if name not in cached_paths:
            raise ConfigError(
                f"data.validation names {name!r}, which is no chain of {data.source}",
                expected=", ".join(cached_paths) or "none is fine enough",
                fix=did_you_mean(name, cached_paths),
            )
    training = {name: path for name, path in cached_paths.items() if name not in data.validation}
    if not training:
        raise DataError(
            f"no chain of {data.source} is left to train on",
            cause=f"all are for validation, or coarser than {data.max_resolution} angstroms",
        )
    read = json.dumps([[name, contents[name], name in data.validation] for name in cached_paths])
    content = hashlib.sha256(read.encode()).hexdigest()
    return Prepared(training, {name: cached_paths[name] for name in data.validation}, content)


def _check_templates(data: Data, cached_paths: Mapping[str, Path]) -> None:
    """Raise `DataError` where not one chain has a template."""
    for path in cached_paths.values():
        with np.load(path, allow_pickle=False) as arrays:
            if int(arrays["templates"]):
                return
    raise DataError(
        f"data.templates = {data.templates}, but no hit of any chain is a template",
        cause="their structures are not there, newer than the chain, or the chain itself",
        fix="set data.template_structures to the directory that holds ENTRY.cif, or data.templates to 0",
    )


def _hits(sources: Files, related: Path | None) -> list[Hit]:
    return read_hhr(sources.hits) if related is not None and sources.hits is not None else []


def _content(sources: Files, related: Path | None, cache: str) -> str:
    """Return a digest of the bytes of all that a chain is read from, related structures too.

    Args:
        sources: the files of the chain.
        related: the directory of related structures; None: they are not asked for.
        cache: the directory `data.cache`.
    """
    files = {f"alignment{sources.alignment.suffix}": sources.alignment}
    files[f"structure{sources.structure.suffix}"] = sources.structure
    hits = _hits(sources, related)
    if related is not None:
        files |= structures_of(hits, related)
    digest = digest_of_files(files, cache)
    return hashlib.sha256(repr((sources.chain, digest, related is not None, hits)).encode()).hexdigest()


def _kept(sources: Files, cache: Path, content: str, related: Path | None) -> Path:
    """Return where a chain is kept; it is read now if it was not."""
    digest = hashlib.sha256(f"{FORMAT} {content}".encode())
    path = cache / digest.hexdigest()[:20] / f"{sources.name}.npz"
    if path.is_file():
        if _is_whole(path):
            return path
        print(f"the cache {path} is damaged and is made anew", flush=True)
    alignment = ALIGNMENTS[sources.alignment.suffix](sources.alignment)
    chain = read_chain(sources.structure, sources.chain)
    check_pair(alignment, chain)
    hits = _hits(sources, related)
    templates = (
        [] if related is None else choose(chain.residue, hits, related, released(sources.structure)).templates
    )
    private_folder(path.parent, "a directory of data.cache")
    arrays = {
        "names": np.array(alignment.names),
        "residues": alignment.residues,
        "deletions": alignment.deletions,
        "templates": np.array(len(templates)),
        **_arrays(chain, ""),
        **{name: a for i, t in enumerate(templates) for name, a in _arrays(t.chain, f"{i}.").items()},
        **{f"{i}.place": t.place for i, t in enumerate(templates)},
    }
    with replaced(path) as file:
        np.savez_compressed(file, **arrays)
    return path


def _is_whole(path: Path) -> bool:
    """Whether every array of a file has the checksum it was written with."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError):
        return False


def _arrays(chain: Chain, prefix: str) -> dict[str, np.ndarray]:
    return {f"{prefix}{name}": np.asarray(value) for name, value in vars(chain).items()}


def _chain(archive: Mapping[str, np.ndarray], prefix: str) -> Chain:
    arrays = {name: archive[f"{prefix}{name}"] for name in ("residue", "atoms", "known")}
    return Chain(str(archive[f"{prefix}name"]), **arrays, resolution=float(archive[f"{prefix}resolution"]))


@dataclass(frozen=True)
class Known:
    """What is known of one chain: its alignment, its structure, and related ones."""

    alignment: Alignment
    chain: Chain
    templates: list[Template]


def load(path: Path) -> Known:
    """What `prepare` has kept. Raises `DataError` where the file has been damaged since."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            alignment = Alignment(tuple(archive["names"].tolist()), archive["residues"], archive["deletions"])
            templates = [
                Template(_chain(archive, f"{i}."), archive[f"{i}.place"])
                for i in range(int(archive["templates"]))
            ]
            return Known(alignment, _chain(archive, ""), templates)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path} is damaged", got=str(error).splitlines()[0], fix="delete it: it is made anew"
        ) from None
