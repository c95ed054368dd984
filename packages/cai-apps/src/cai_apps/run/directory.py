"""The files of a run.

RUN_DIR/config.toml      the config with everything worked out
        metrics.jsonl    one record per step
        checkpoints/ plots/ export/ crash/
        and what the application puts there
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cai_apps.config import file as config_file
from cai_apps.config.sections import Logged
from cai_mesh.errors import ConfigError
from cai_mesh.paths import DIRECTORY, folder, refuse_links, write_text


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @classmethod
    def of(cls, config: Logged, label: str) -> RunDirectory:
        """Where a run of `config` goes: `log.directory`, or runs/<label>-<time>."""
        path = Path(config.log.directory or f"runs/{label}-{datetime.now():%Y%m%d-%H%M%S}")
        return cls(path.expanduser().absolute())

    def create(self, config: Logged) -> None:
        """Makes the directory and writes the config there.

        Raises:
            ConfigError: a symbolic link lies in the directory; nothing is written through one.
        """
        self.path.mkdir(mode=DIRECTORY, parents=True, exist_ok=True)
        refuse_links(self.path, shallow=self.checkpoints)
        for directory in (self.checkpoints, self.plots, self.crash):
            folder(directory)
        write_text(self.config_file, config_file.to_toml(config))

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """An existing run directory.

        Raises:
            ConfigError: the path has no config.toml.
        """
        run = cls(Path(path).expanduser().absolute())
        if not run.config_file.is_file():
            raise ConfigError(
                f"not a run directory: {path}", expected="a directory with the config.toml of a run"
            )
        return run

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def crash(self) -> Path:
        return self.path / "crash"

    @property
    def export(self) -> Path:
        return self.path / "export"

    def record_crash(self, rank: int, error: BaseException) -> None:
        """Writes the traceback of a rank to crash/rank-<rank>.txt."""
        text = "".join(traceback.format_exception(error))
        write_text(self.crash / f"rank-{rank}.txt", text)
