"""Directories of chains through `cai train`, `cai fold` and `cai report`, as somebody uses them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from small_hhr import hhr

from cai_apps import recipes
from cai_apps.applications.protein.chemistry import UNKNOWN
from cai_apps.applications.protein.config import Data
from cai_apps.applications.protein.data.chains import directory_of, load, prepare
from cai_apps.applications.protein.data.structures import read_chain
from cai_apps.applications.protein.export import load_export
from cai_apps.applications.protein.fold import Options, fold, likeness
from cai_apps.applications.protein.report import laid_upon
from cai_apps.applications.protein.task import PROTEIN
from cai_apps.cli import main
from cai_apps.run.train import train
from cai_mesh.errors import CaiError

SHIPPED = directory_of("shipped")
CHANGES = {
    "train.steps": 2, "train.device": "cpu", "parallel.shard": 1, "parallel.zero": 1, "data.residues": 24,
    "data.sequences": 4, "data.extra": 5,
}  # fmt: skip


@pytest.fixture
def chains(tmp_path) -> Path:
    """A directory as a user has one: a chain by its entry, one named in its entry, and hits of the first."""
    home = tmp_path / "chains"
    home.mkdir()
    shutil.copy(SHIPPED / "1A8O.cif", home)
    shutil.copy(SHIPPED / "1A8O.a3m", home)
    shutil.copy(SHIPPED / "4CUP.cif", home)
    shutil.copy(SHIPPED / "4CUP.a3m", home / "4CUP_A.a3m")
    query, related = (read_chain(home / f"{name}.cif").sequence for name in ("4CUP", "1A8O"))
    (home / "4CUP_A.hhr").write_text(hhr([("1A8O_A", query[2:62], related[5:65], 3, 6, 40.0)]))
    return home


def data(source: Path, tmp_path: Path, **more) -> Data:
    return Data(source=str(source), cache=str(tmp_path / "cache"), **more)


def test_a_directory_is_read_once_and_anew_when_it_changes(chains, tmp_path):
    options = data(chains, tmp_path, templates=2, validation=("1A8O",))
    found = prepare(options)
    assert list(found.training) == ["4CUP_A"]
    assert list(found.validation) == ["1A8O"]
    first = found.file("4CUP_A")
    written = first.stat().st_mtime_ns
    assert prepare(options).file("4CUP_A").stat().st_mtime_ns == written, "it was read again"
    known = load(first)
    assert known.chain.sequence == read_chain(chains / "4CUP.cif").sequence
    assert (len(known.alignment.residues), len(known.templates)) == (32, 1)
    assert known.templates[0].place[2] == 5
    assert not load(found.file("1A8O")).templates
    rows = (chains / "4CUP_A.a3m").read_text().splitlines()
    (chains / "4CUP_A.a3m").write_text("\n".join(rows[:4]) + "\n")
    again = prepare(options)
    assert again.file("4CUP_A") != first
    assert len(load(again.file("4CUP_A")).alignment.residues) == 2


def test_a_kept_file_that_is_damaged_is_made_anew_or_named(chains, tmp_path):
    path = prepare(data(chains, tmp_path)).file("1A8O")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert len(load(prepare(data(chains, tmp_path)).file("1A8O")).chain.residue) == 70
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    with pytest.raises(CaiError, match="is damaged"):
        load(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda home: (home / "4CUP.cif").unlink(), "no structure of 4CUP_A"),
        (lambda home: shutil.copy(home / "4CUP_A.a3m", home / "4CUP_B.a3m"), "no chain B"),
        (lambda home: shutil.copy(home / "1A8O.a3m", home / "1A8O.sto"), "two alignments of 1A8O"),
        (lambda home: shutil.copy(home / "1A8O.a3m", home / "4CUP_A.a3m"), "is not of 4CUP_A"),
        (lambda home: [each.unlink() for each in home.glob("*.a3m")], "no alignments in"),
        (lambda home: (home / "4CUP_A.hhr").unlink(), "has related structures"),
        (lambda home: (home / "4CUP_A.hhr").write_text(hhr([])), "no hit of any chain is a template"),
    ],
)
def test_a_damaged_directory_is_refused(chains, tmp_path, change, said):
    change(chains)
    with pytest.raises(CaiError, match=said):
        prepare(data(chains, tmp_path, templates=1))


def test_train_fold_and_report(chains, tmp_path, capsys):
    """With templates, on two ranks; a checkpoint goes on; what comes out is read back."""
    run, output = tmp_path / "run", tmp_path / "folded"
    shape = ["--data.residues", "24", "--data.sequences", "4", "--data.extra", "5", "--train.device", "cpu"]
    command = ["train", "alphafold-tiny", "--data.source", str(chains), "--data.templates", "2"]
    command += ["--data.cache", str(tmp_path / "cache"), "--log.directory", str(run), *shape]
    command += ["--folding.every", "1", "--optimizer.clip_samples", "0.1"]
    assert main([*command, "--train.steps", "2"]) == 0
    assert main([*command, "--train.steps", "3", "--parallel.shard", "1"]) == 0
    out = capsys.readouterr().out
    assert "resumed from" in out
    assert "folded         1A8O: lDDT" in out
    scores = {p.parent.name: json.loads(p.read_text()) for p in (run / "folds").glob("*/scores.json")}
    assert set(scores) == {"1", "2", "3"}
    assert 0 <= scores["3"]["1A8O"]["lddt"] <= 1
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "lDDT of alpha carbons" in page
    assert "expected error, angstroms" in page
    assert "step 3" in page
    a3m, hits = chains / "4CUP_A.a3m", chains / "4CUP_A.hhr"
    assert main(["fold", str(run), str(a3m), "--output", str(output), "--templates", str(hits)]) == 0
    with_hits = read_chain(output / "4CUP_A.cif")
    assert main(["fold", str(run), str(a3m), "--output", str(output)]) == 0
    assert not np.array_equal(with_hits.atoms, read_chain(output / "4CUP_A.cif").atoms), (
        "templates change nothing"
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A trained tiny model."""
    home = tmp_path_factory.mktemp("run")
    changes = CHANGES | {"log.directory": str(home / "run"), "data.cache": str(home / "cache")}
    return train(PROTEIN, recipes.load("alphafold-tiny", changes), label="fold").path


def test_a_fold_is_written_with_its_confidence(run, tmp_path):
    model = load_export(run / "export")
    alignment = load(prepare(data(SHIPPED, tmp_path)).file("1A8O")).alignment
    found = fold(model, "1A8O", alignment, Options(rounds=2, sequences=8, extra=8))
    path = tmp_path / "x.cif"
    found.write(path)
    back = read_chain(path)
    np.testing.assert_allclose(back.atoms[back.known], found.chain.atoms[found.chain.known], atol=2e-3)
    np.testing.assert_array_equal(back.residue, found.chain.residue)
    import gemmi

    written = [residue[0].b_iso for residue in gemmi.read_structure(str(path))[0][0]]
    np.testing.assert_allclose(written, found.plddt, atol=0.01)
    (said,) = json.loads(path.with_suffix(".pae.json").read_text())
    errors = np.array(said["predicted_aligned_error"])
    assert errors.shape == (70, 70)
    assert 0 < errors.min() <= errors.max() <= said["max_predicted_aligned_error"]
    again = fold(model, "1A8O", alignment, Options(rounds=2, sequences=8, extra=8))
    np.testing.assert_array_equal(again.chain.atoms, found.chain.atoms)
    assert likeness(found.chain, found.chain) == pytest.approx(1.0)


def test_sequences_alone_and_weights_of_openfold(run, tmp_path, capsys):
    fasta = tmp_path / "two.fasta"
    fasta.write_text(">sp|P1 first\nMKVLAAGXWK\n>sp|P1 again\nACDEFGHIKL\n")
    weights = run / "export" / "openfold.pt"
    assert (
        main(["fold", str(weights), str(fasta), "--preset", "alphafold-tiny", "--output", str(tmp_path)]) == 0
    )
    assert "10 residues, 1 sequence, confidence" in capsys.readouterr().out
    first = read_chain(tmp_path / "sp_P1.cif")
    assert first.sequence == "MKVLAAGXWK"
    assert first.residue[7] == UNKNOWN
    assert read_chain(tmp_path / "sp_P1_2.cif").sequence == "ACDEFGHIKL"


@pytest.mark.parametrize(
    ("file", "content", "options", "said"),
    [
        ("x.fasta", ">a\nMKVB1\n", [], "a letter that is no residue"),
        ("x.fasta", "", [], "no sequence"),
        ("x.a3m", ">a\nMKV\n>b\nMK\n", [], "another length"),
        ("x.txt", "MKV", [], "of no known kind"),
        ("x.fasta", ">a\nMKV\n", ["--rounds", "0"], "--rounds is too small"),
        ("x.fasta", ">a\nMKV\n>b\nMKV\n", ["--templates", "x.hhr"], "templates are of one chain"),
        ("x.fasta", ">a\nMKVAAAAAAAA\n", ["--templates", str(SHIPPED / "1A8O.cif")], "reads no templates"),
        ("x.fasta", ">a\nMKV\n", ["--seeed", "1"], "did you mean 'seed'"),
    ],
)
def test_what_cannot_be_folded_is_refused(run, tmp_path, capsys, file, content, options, said):
    (tmp_path / file).write_text(content)
    assert main(["fold", str(run), str(tmp_path / file), *options]) == 2
    assert said in capsys.readouterr().err


def test_no_model_and_weights_that_are_not_finite(run, tmp_path, capsys):
    (tmp_path / "x.fasta").write_text(">a\nMKV\n")
    assert main(["fold", str(tmp_path), str(tmp_path / "x.fasta")]) == 2
    assert "no export of AlphaFold" in capsys.readouterr().err
    held = torch.load(run / "export" / "openfold.pt", weights_only=True)
    held["evoformer.blocks.1.pair_stack.pair_transition.linear_2.bias"][:] = float("nan")
    torch.save(held, tmp_path / "broken.pt")
    command = ["fold", str(tmp_path / "broken.pt"), str(tmp_path / "x.fasta"), "--preset", "alphafold-tiny"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "is not finite" in said
    assert "first output that is not: evoformer.blocks.1.pair.transition.out" in said


def test_known_structures_are_laid_upon_folded_ones():
    draws = np.random.default_rng(0)
    points, known = draws.normal(size=(9, 3)), np.arange(9) != 4
    turn, _ = np.linalg.qr(draws.normal(size=(3, 3)))
    turn *= np.linalg.det(turn)
    np.testing.assert_allclose(laid_upon(points, points @ turn + 7.0, known), points @ turn + 7.0, atol=1e-9)


def test_no_two_sequences_have_one_name_of_files():
    from cai_apps.applications.protein.commands.fold import file_names

    for names, files in {
        ("a_3", "a", "a"): ["a_3", "a", "a_4"],
        ("a", "a", "a_2"): ["a", "a_3", "a_2"],
        ("a", "A", "a"): ["a", "A_2", "a_3"],
        ("sp|P1 x", "sp/P1 y", ""): ["sp_P1", "sp_P1_2", "all"],
        ("", "", "all"): ["all", "all_2", "all_3"],
        ("n" * 70, "n" * 80): ["n" * 60, "n" * 60 + "_2"],
    }.items():
        assert file_names(names, "all") == files
        assert len({name.casefold() for name in files}) == len(files)
