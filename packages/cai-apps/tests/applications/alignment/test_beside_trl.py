"""Losses and gradients beside TRL's own trainers, on batches that they collate of the same records.

Where TRL defines something otherwise, its number with that one thing changed is ours; `docs/preferences.md` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl_toys import (
    BARE,
    END,
    LINES,
    MARGINS,
    PADDING,
    PAIRS,
    TURNS,
    Ours,
    Result,
    by_kto_trainers,
    by_trainer,
    judged,
    loaded,
    measured,
    options,
    pair,
    records_of,
    tokenizer,
    write_model,
    write_records,
)

from cai_apps.applications.alignment.config import Alignment
from cai_mesh.testing import run_ranks

SMOOTHING = 0.2
LABELS = [True, False, True, False, False]
SHORT = [("7", "Hi.", "So long, and bye."), ("5", "Hello?", "bye"), ("2", "So?", "a question")]
"""Prompts of one token, and better answers of as many tokens as each other."""
RECORDS = {
    "pairs": [pair(*texts) for texts in PAIRS],
    "margins": [pair(*texts, margin=margin) for texts, margin in zip(PAIRS, MARGINS, strict=True)],
    "one pair": [pair(*PAIRS[0])],
    "short": [pair(*texts) for texts in SHORT],
    "judged": judged(LABELS),
    "judged, back to front": judged(LABELS)[::-1],
    "two": judged([True, False]),
    "good": judged([True, True]),
    "bad": judged([False, False]),
}


@dataclass(frozen=True)
class Case:
    """A run of ours, and the trainer of TRL whose definition is the same, or is so but for one thing.

    Args:
        ours: the algorithm and its options.
        trainer: the trainer and the class of its arguments.
        theirs: arguments of the trainer.
        records: the name in `RECORDS` of those that ours reads.
        trl: the name of those that TRL reads; None: the same.
        template: the chat template.
        padding: whether the tokenizer has a token that fills texts up.
    """

    ours: Alignment
    trainer: tuple[type, type]
    theirs: dict[str, Any]
    records: str = "pairs"
    trl: str | None = None
    template: str = TURNS
    padding: str | None = PADDING


REWARD, DPO, KTO = (RewardTrainer, RewardConfig), (DPOTrainer, DPOConfig), (KTOTrainer, KTOConfig)
ORPO, CPO = (ORPOTrainer, ORPOConfig), (CPOTrainer, CPOConfig)
WEIGHTS = {"desirable_weight": 1.3, "undesirable_weight": 0.6}
KTO_OURS, KTO_THEIRS = Alignment("kto", beta=0.05, **WEIGHTS), {"beta": 0.05, **WEIGHTS}
SAME = {
    "reward": Case(Alignment("reward"), REWARD, {}),
    "reward of margins": Case(Alignment("reward"), REWARD, {}, "margins"),
    "reward around 0": Case(
        Alignment("reward", center=0.05), REWARD, {"center_rewards_coefficient": 0.05}, "margins"
    ),
    "reward at a line feed": Case(Alignment("reward"), REWARD, {}, template=LINES),
    "dpo": Case(Alignment("dpo"), DPO, {}),
    "dpo-hinge": Case(Alignment("dpo-hinge", beta=0.02), DPO, {"loss_type": "hinge", "beta": 0.02}),
    "ipo": Case(Alignment("ipo", beta=0.3), DPO, {"loss_type": "ipo", "beta": 0.3}),
    "dpo-robust": Case(
        Alignment("dpo-robust", label_smoothing=SMOOTHING),
        DPO,
        {"loss_type": "robust", "label_smoothing": SMOOTHING},
    ),
    "cdpo": Case(
        Alignment("dpo", label_smoothing=SMOOTHING),
        DPO,
        {"loss_type": "aot", "label_smoothing": SMOOTHING},
        "one pair",
    ),
    "kto": Case(KTO_OURS, KTO, KTO_THEIRS, "judged, back to front", "judged"),
    "kto of two": Case(KTO_OURS, KTO, KTO_THEIRS, "two"),
    "kto of good ones": Case(KTO_OURS, KTO, KTO_THEIRS, "good"),
    "kto of bad ones": Case(KTO_OURS, KTO, KTO_THEIRS, "bad"),
    "simpo": Case(
        Alignment("simpo", beta=2.5, margin=0.7),
        CPO,
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.5, "simpo_gamma": 0.7},
    ),
    "orpo": Case(Alignment("orpo", beta=0.4), ORPO, {"beta": 0.4}, "short", template=BARE),
}
OTHER = {
    "dpo of lines": Case(Alignment("dpo"), DPO, {}, template=LINES),
    "ipo of lines": Case(Alignment("ipo", beta=0.3), DPO, {"loss_type": "ipo", "beta": 0.3}, template=LINES),
    "cdpo of five": Case(
        Alignment("dpo", label_smoothing=SMOOTHING),
        DPO,
        {"loss_type": "sigmoid", "label_smoothing": SMOOTHING},
    ),
    "reward without padding": Case(Alignment("reward"), REWARD, {}, padding=None),
    "kto in order": Case(KTO_OURS, KTO, KTO_THEIRS, "judged"),
    "orpo of pairs": Case(Alignment("orpo", beta=0.4), ORPO, {"beta": 0.4}),
    "simpo of lines": Case(
        Alignment("simpo"),
        CPO,
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0},
        template=LINES,
    ),
}
CASES = SAME | OTHER


class Places:
    """Models and records of cases, written once."""

    def __init__(self, home: Path):
        self.home = home
        self.files = {
            name: write_records(home / f"{number}.jsonl", records)
            for number, (name, records) in enumerate(RECORDS.items())
        }

    def model(self, case: Case, seed: int) -> Path:
        head = case.trainer is REWARD
        number = [TURNS, LINES, BARE].index(case.template)
        directory = self.home / f"model-{number}-{seed}-{head}-{case.padding}"
        if not directory.exists():
            write_model(directory, seed, template=case.template, labels=int(head), padding=case.padding)
        return directory

    def ours(self, case: Case) -> Ours:
        reference = self.model(case, 2) if case.trainer in (DPO, KTO) else None
        return Ours(case.ours, self.model(case, 1), self.files[case.records], reference)

    def trainer(self, name: str, **more: Any) -> Any:
        case = CASES[name]
        kind, arguments = case.trainer
        file = case.trl or case.records
        every = options(self.home / "output", len(RECORDS[file])) | case.theirs | more
        references = {"ref_model": loaded(self.model(case, 2))} if case.trainer in (DPO, KTO) else {}
        return kind(
            loaded(self.model(case, 1), case.trainer is REWARD),
            **references,
            args=arguments(**every),
            train_dataset=records_of(self.files[file]),
            processing_class=tokenizer(case.template, case.padding),
        )


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return Places(tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="module")
def ours(places) -> Callable[[str], Result]:
    """What ours says of every case, by one rank. They share a cache: each finds there what its own reference says."""
    jobs = {
        name: places.ours(case).job(places.home / f"run-{number}")
        for number, (name, case) in enumerate(CASES.items())
    }
    return run_ranks(1, measured, jobs)[0].__getitem__


def assert_same(one: Result, other: Result) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    assert one[1].keys() == other[1].keys()
    for name, gradient in other[1].items():
        difference = (one[1][name] - gradient).norm()
        assert difference <= 1e-5 * gradient.norm(), name
        assert gradient.norm() > 0, name


def is_other(one: Result, other: Result) -> bool:
    return abs(one[0] - other[0]) > 1e-4 * abs(other[0])


@pytest.mark.parametrize("name", SAME)
def test_definitions_that_are_the_same(name, places, ours):
    assert_same(ours(name), by_trainer(places.trainer(name)))


@pytest.mark.parametrize("name", ["dpo of lines", "ipo of lines"])
def test_trl_scores_what_a_template_writes_after_the_end_of_an_answer(name, places, ours):
    trainer = places.trainer(name)
    assert is_other(ours(name), by_trainer(trainer))

    def change(batch):
        ends = batch["input_ids"] == trainer.processing_class.convert_tokens_to_ids(END)
        after = torch.roll(ends, 1, 1)
        return batch | {"completion_mask": batch["completion_mask"].masked_fill(after, 0)}

    assert_same(ours(name), by_trainer(trainer, change))


def test_trl_smooths_no_labels_of_dpo(places, ours):
    theirs = by_trainer(places.trainer("cdpo of five"))
    assert is_other(ours("cdpo of five"), theirs)
    assert_same(ours("dpo"), theirs)


def test_trl_reads_a_reward_before_the_end_where_that_is_what_fills_texts_up(places, ours):
    trainer = places.trainer("reward without padding")
    assert is_other(ours("reward without padding"), by_trainer(trainer))
    number = trainer.processing_class.convert_tokens_to_ids(PADDING)
    trainer.data_collator.pad_token_id = trainer.model.config.pad_token_id = number
    assert_same(ours("reward without padding"), by_trainer(trainer))


def test_kto_on_two_ranks(places, tmp_path):
    """Both estimate the reference point on the records of all ranks, of which each has two.

    TRL joins a prompt with the other answer of its rank's two records, ours with the next answer: with the first and
    the third answer alike these are the same.
    """
    records = judged([True, False, True, True])
    records[2]["completion"] = records[0]["completion"]
    file = write_records(tmp_path / "records.jsonl", records)
    ours = Ours(KTO_OURS, places.model(CASES["kto"], 1), file, places.model(CASES["kto"], 2))
    mine = run_ranks(1, measured, {"kto": ours.job(tmp_path / "run")})[0]["kto"]
    assert_same(mine, run_ranks(2, by_kto_trainers, ours, tmp_path, KTO_THEIRS)[0])


def test_trl_turns_answers_the_other_way_round(places, ours):
    """A prompt has the answer of the record before it; of ours it has that of the record after it."""
    theirs = by_trainer(places.trainer("kto in order"))
    assert is_other(ours("kto in order"), theirs)
    assert_same(ours("kto"), theirs)


def test_trl_has_the_prompt_in_the_likelihood_of_orpo(places, ours):
    """Its mean is over all tokens of the batch; ours is over pairs, of means over tokens of answers."""
    trainer = places.trainer("orpo of pairs")
    mine, theirs = ours("orpo of pairs"), by_trainer(trainer)
    assert is_other(mine, theirs)
    model = loaded(places.model(CASES["orpo of pairs"], 1))
    tokens, answers = [], []
    for record in trainer.train_dataset:
        ids, labels = torch.tensor(record["chosen_input_ids"]), torch.tensor(record["chosen_labels"])
        scores = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        likelihoods = scores.gather(1, ids[1:, None]).squeeze(1)
        tokens.append(likelihoods)
        answers.append(likelihoods[labels[1:] != -100].mean())
    difference = torch.stack(answers).mean() - torch.cat(tokens).mean()
    difference.backward()
    assert_same(
        (
            mine[0] + float(difference),
            {name: mine[1][name] + param.grad for name, param in model.named_parameters()},
        ),
        theirs,
    )


def test_trl_ends_an_answer_once_more_after_a_line_feed(places, ours):
    """Trainers of CPO and ORPO ask for the token of an end at the end of the text."""
    trainer = places.trainer("simpo of lines")
    end = trainer.processing_class.convert_tokens_to_ids(END)
    for record in trainer.train_dataset:
        for side in ("chosen", "rejected"):
            first, _, last = record[f"{side}_input_ids"][-3:]
            assert first == last == end
    assert is_other(ours("simpo of lines"), by_trainer(trainer))

    def change(batch):
        for side in ("chosen", "rejected"):
            labels = batch[f"{side}_labels"]
            sizes = (labels != -100).int()
            batch[f"{side}_labels"] = labels.masked_fill(sizes.flip(1).cumsum(1).flip(1) <= 2, -100)
        return batch

    assert_same(ours("simpo of lines"), by_trainer(trainer, change))
