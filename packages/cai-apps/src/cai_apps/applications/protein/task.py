"""AlphaFold as a run sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cai_apps.applications.protein.config import Config
from cai_apps.applications.protein.data.batch import blank
from cai_apps.applications.protein.data.chains import Prepared, prepare
from cai_apps.applications.protein.data.pretrained import prepare_weights
from cai_apps.applications.protein.data.samples import Pieces
from cai_apps.applications.protein.design import sizes_for
from cai_apps.applications.protein.export import export
from cai_apps.applications.protein.flops import piece_flops
from cai_apps.applications.protein.folds import fold_at_the_end, fold_on_the_way
from cai_apps.applications.protein.memory import check_room
from cai_apps.applications.protein.validation import resolve
from cai_apps.applications.protein.workload import piece_of, workload
from cai_apps.compose.workload import Workload
from cai_apps.data.batches import count_present
from cai_apps.report.outcome import show_outcome
from cai_apps.run.files.origin import Origin
from cai_apps.run.files.position import Unit
from cai_apps.run.task import Work

if TYPE_CHECKING:
    from cai_apps.compose.session import Session
    from cai_apps.run.files.directory import RunDirectory
    from cai_apps.run.task import Job


class ProteinTask:
    """`cai_apps.run.task.Task` of AlphaFold."""

    def resolve(self, config: Config, ranks: int) -> Config:
        return resolve(config, ranks)

    def workload(self, config: Config) -> Workload:
        return workload(config)

    def prepare(self, config: Config, before: RunDirectory | None = None) -> Prepared:
        check_room(config, sizes_for(config))
        prepared = prepare(config.data)
        prepare_weights(config)
        for name in config.folding.chains:
            prepared.file(name)
        return prepared

    def base(self, config: Config) -> None:
        return None

    def origin(self, prepared: Prepared) -> Origin:
        chains = len(prepared.training) + len(prepared.validation)
        return Origin({}, prepared.content, f"{chains:,} chains")

    def announce(self, config: Config, prepared: Prepared) -> str:
        chains, data = len(prepared.training), config.data
        return f"{config.model.name} on {chains:,} chains, {data.residues} residues of each"

    def fill(self, job: Job) -> None:
        """Nothing else belongs into a run directory."""

    def work(self, job: Job) -> Work:
        config: Config = job.config
        piece, seed = piece_of(config), config.train.seed
        options = (piece, config.objective.rounds, config.train.global_batch, seed)
        validation = list(job.prepared.validation.values())
        per_piece = piece_flops(config)
        return Work(
            workload(config),
            Pieces(list(job.prepared.training.values()), *options),
            Pieces(validation, *options, fixed=True) if validation else None,
            count=lambda batch: count_present(batch, len(batch["residue"])),
            counted="chains",
            unit=Unit("chains"),
            blank=blank,
            flops={"mfu_full_attention": lambda batch: per_piece * len(batch["residue"])},
            after_step=lambda session, step: fold_on_the_way(session, job, step),
        )

    def export(self, session: Session, job: Job) -> None:
        export(session, job.config, job.run.export)

    def finish(self, job: Job) -> None:
        show_outcome(job.run, job.config)
        print(f"export         {job.run.export}")
        fold_at_the_end(job)


PROTEIN = ProteinTask()
