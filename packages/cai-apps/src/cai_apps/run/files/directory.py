"""The files of a run.

RUN_DIR/config.toml      the config with everything worked out, of the last start that got to train
        run.lock         while a run writes here
        starts.jsonl     when, by which command and on which machine it was started, a line a start
        metrics.jsonl    one record per step
        texts.jsonl      what the model said after each validation
        checkpoints/ plots/ export/ crash/
        and what the application puts there
"""

from __future__ import annotations

import sys
import tempfile
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cai_apps.config import file as config_file
from cai_apps.config.sections import Logged
from cai_mesh.errors import ConfigError
from cai_mesh.files import DIRECTORY, folder, refuse_links, write_text


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @classmethod
    def of(cls, config: Logged, label: str) -> RunDirectory:
        """Where a run of `config` goes: `log.directory`, or runs/<label>-<time>."""
        path = Path(config.log.directory or f"runs/{label}-{datetime.now():%Y%m%d-%H%M%S}")
        return cls(path.expanduser().absolute())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs out of the directory. It is made where it is not there, and removed again if it stays empty.

        Raises:
            CheckpointError: another run is going on there; it names the process.
            ConfigError: nothing can be written there.
        """
        from cai_mesh.checkpoint import Lock

        try:
            self.path.mkdir(mode=DIRECTORY, parents=True, exist_ok=True)
            lock = Lock(self.path / "run.lock", uuid.uuid4().hex, doing="training there")
        except OSError as error:
            raise ConfigError(
                f"nothing can be written into the run directory {self.path}",
                cause=error.strerror or str(error),
                fix="choose another log.directory",
            ) from None
        try:
            yield
        finally:
            lock.release()
            with suppress(OSError):
                self.path.rmdir()

    def check_kind(self, application: str) -> None:
        """Raises ConfigError where the directory holds a run of another application, which would be written over."""
        if not self.config_file.is_file():
            return
        recorded_application = config_file.parse(self.config_file).get("application", application)
        if recorded_application != application:
            raise ConfigError(
                f"{self.path} holds a run of another kind",
                got=str(recorded_application),
                expected=application,
                fix="choose another log.directory",
            )

    def create(self, config: Logged) -> None:
        """Makes what the directory lacks. A config that is there stays; `record` replaces it.

        Raises:
            ConfigError: a symbolic link lies in the directory; nothing is written through one.
        """
        self.path.mkdir(mode=DIRECTORY, parents=True, exist_ok=True)
        refuse_links(self.path, shallow=self.checkpoints)
        for directory in (self.checkpoints, self.plots, self.crash):
            folder(directory)
        if not self.config_file.exists():
            self.record(config)

    def record(self, config: Logged) -> None:
        """Writes the config, whole or not at all."""
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
    def texts(self) -> Path:
        return self.path / "texts.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        """The directory of the checkpoint with the lowest validation loss, if `checkpoint.best` asks for one."""
        return self.path / "best"

    @property
    def best_export(self) -> Path:
        """The directory of the model that a command has made of that checkpoint."""
        return self.path / "best-export"

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
        """Writes the traceback of a rank to crash/rank-<rank>.txt; where that cannot be written, into a temporary file,
        and says so."""
        text = "".join(traceback.format_exception(error))
        try:
            write_text(self.crash / f"rank-{rank}.txt", text)
            error.add_note(f"it is in {self.crash / f'rank-{rank}.txt'}")
        except OSError as full:
            prefix = f"cai-crash-rank-{rank}-"
            with tempfile.NamedTemporaryFile("w", prefix=prefix, suffix=".txt", delete=False) as elsewhere:
                elsewhere.write(text)
            message = f"{self.crash} cannot be written ({full.strerror})"
            print(
                f"{message}: the traceback of rank {rank} is in {elsewhere.name}", file=sys.stderr, flush=True
            )
