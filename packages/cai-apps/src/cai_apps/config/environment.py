"""Variables of the environment that say what a process is to be, read and checked. Needs no torch."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Mapping

from cai_mesh.errors import ConfigError

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER = "CAI_LAUNCHER"
"""The process that started a rank, where `cai train` did."""
HANG = "CAI_HANG_SECONDS"
"""Seconds without a step after which a run is ended, in place of what is measured; 0: never."""
RESOLVE_SECONDS = 30.0
"""Seconds for which a machine's name may be without an address."""


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one of its ranks.

    Raises:
        ConfigError: only some of the variables a launcher sets are there, or one has a value that no launcher sets;
            or srun started several processes that do not know their ranks.
    """
    if "RANK" not in environment:
        _refuse_tasks_of_slurm(environment)
        return False
    missing = [name for name in LAUNCHER_VARIABLES if name not in environment]
    if missing:
        raise ConfigError(
            f"RANK is set but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not",
            got=f"RANK={environment['RANK']}",
            expected=", ".join(LAUNCHER_VARIABLES),
            cause="a launcher sets all four; RANK alone is often left over from another program",
            fix="unset RANK to let cai start the ranks, or start them with `cai run`, torchrun or srun",
        )
    if not re.fullmatch(r"[\w.:%-]+", environment["MASTER_ADDR"], re.ASCII):
        raise ConfigError(
            "the environment variable MASTER_ADDR is no name or address of a machine",
            got=f"MASTER_ADDR={environment['MASTER_ADDR'][:40]}",
            expected="as 10.0.0.1 or node-1",
        )
    world = number_in(environment, "WORLD_SIZE", least=1)
    number_in(environment, "RANK", most=world - 1)
    number_in(environment, "MASTER_PORT", least=1, most=65535)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if name in environment:
            number_in(environment, name, most=world - 1)
    if "LOCAL_WORLD_SIZE" in environment:
        number_in(environment, "LOCAL_WORLD_SIZE", least=1, most=world)
    return True


def _refuse_tasks_of_slurm(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for one of several tasks of an srun, each of which would be a run of its own."""
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return
    tasks = number_in(environment, "SLURM_STEP_NUM_TASKS", least=1)
    if tasks > 1:
        raise ConfigError(
            "srun started several tasks, and RANK is not set",
            got=f"SLURM_STEP_NUM_TASKS={tasks}",
            expected=", ".join(LAUNCHER_VARIABLES),
            cause="each task would be a run of its own: srun numbers tasks as SLURM_PROCID and not as RANK",
            fix="start one task a machine, with `cai run --nnodes ... train ...`; or export RANK, WORLD_SIZE and "
            "LOCAL_RANK from SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID, with MASTER_ADDR and MASTER_PORT",
        )


def check_address(name: str, host: str, seconds: float = RESOLVE_SECONDS) -> None:
    """Wait until a machine's name means an address.

    Args:
        name: the variable or option that has it.
        host: the machine's name, or its address.
        seconds: seconds to wait: a machine that starts with this one gets its name a little later.

    Raises:
        ConfigError: it does not in that time; torch would ask again for minutes.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= until:
                raise ConfigError(
                    f"no machine has the name that {name} says",
                    got=f"{name}={host}",
                    cause=f"{getattr(error, 'strerror', None) or error}, for {seconds:.0f} seconds",
                    fix="correct the name, or give the machine's address",
                ) from None
        time.sleep(min(1.0, max(0.0, until - time.monotonic())))


def number_in(environment: Mapping[str, str], name: str, least: int = 0, most: int | None = None) -> int:
    """A whole number of the environment. Raises ConfigError for what is none, or out of its range."""
    text = environment[name]
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if value < least or (most is not None and value > most):
        raise ConfigError(
            f"the environment variable {name} has a value that no launcher sets",
            got=f"{name}={text[:40]}",
            expected=f"a whole number of at least {least}"
            + (f" and at most {most}" if most is not None else ""),
            fix=f"unset {name} and the other variables of a launcher to let cai start the ranks",
        )
    return value


def hang_limit(environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds of `HANG`; None: it is not set. Raises ConfigError for what is no number of seconds."""
    given = environment.get(HANG)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ConfigError(
            f"the environment variable {HANG} is no number of seconds",
            got=f"{HANG}={given}",
            expected="0 (never) or more",
        )
    return seconds


def launcher_pid(environment: Mapping[str, str] = os.environ) -> int | None:
    """The process that started this rank and without which it should end; None: there is none."""
    if LAUNCHER in environment:
        return int(environment[LAUNCHER])
    return os.getppid() if "TORCHELASTIC_RUN_ID" in environment else None
