"""Loggers that speak on some ranks only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

__all__ = ["DistributedLogger", "disable_existing_loggers", "get_dist_logger"]

FORMAT = "colossalai - %(name)s - %(levelname)s: %(message)s"


class DistributedLogger:
    """A logger of a name whose lines may be those of some ranks.

    Args:
        name: the name; loggers of one name are one.
    """

    def __init__(self, name: str):
        self._name, self._logger = name, logging.getLogger(name)
        if not self._logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter(FORMAT))
            self._logger.addHandler(handler)
            self._logger.setLevel(logging.INFO)
            self._logger.propagate = False

    @staticmethod
    def get_instance(name: str) -> DistributedLogger:
        """Return the logger of a name."""
        return DistributedLogger(name)

    @property
    def rank(self) -> int:
        """This rank's number; 0 before ranks are joined."""
        return dist.get_rank() if dist.is_initialized() else 0

    def set_level(self, level: str) -> None:
        """Say nothing below a level: "DEBUG", "INFO", "WARNING" or "ERROR"."""
        self._logger.setLevel(level)

    def log_to_file(
        self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None
    ) -> None:
        """Write lines into a file of this rank too, in a directory."""
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        ending = f"_{suffix}" if suffix else ""
        handler = logging.FileHandler(directory / f"rank_{self.rank}{ending}.log", mode)
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter(FORMAT))
        self._logger.addHandler(handler)

    def _say(self, level: int, message: str, ranks: Sequence[int] | None) -> None:
        if ranks is None or self.rank in ranks:
            self._logger.log(level, message)

    def info(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Say something on some ranks; None: on all."""
        self._say(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Warn on some ranks; None: on all."""
        self._say(logging.WARNING, message, ranks)

    def debug(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Say a detail on some ranks; None: on all."""
        self._say(logging.DEBUG, message, ranks)

    def error(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Tell of an error on some ranks; None: on all."""
        self._say(logging.ERROR, message, ranks)


def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """Return the logger of a name."""
    return DistributedLogger(name)


def disable_existing_loggers(
    include: list[str] | None = None, exclude: Sequence[str] = ("colossalai",)
) -> None:
    """Let loggers say warnings only.

    Args:
        include: names of loggers; None: all but those of `exclude`.
        exclude: names of loggers that go on.
    """
    for name in list(logging.root.manager.loggerDict):
        if (include is None or name in include) and name not in exclude:
            logging.getLogger(name).setLevel(logging.WARNING)
