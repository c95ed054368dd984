"""A stage that dies or sleeps in the middle of a step: `dying.py DIRECTORY HOW DEVICE`, on two pipeline ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from runs import DEVICES

from cai_apps.cli import main as cai
from cai_pipeline.plans.actions import Action, Kind
from cai_pipeline.run import executor

FATAL = Action(Kind.BACKWARD, 1, 2)
OPTIONS = {
    "train.steps": 6, "train.global_batch": 4, "train.microbatch_size": 1, "train.validate_every": 0,
    "data.limit_bytes": 50_000, "data.sequence_length": 16, "log.sample_tokens": 0,
    "parallel.shard": 1, "parallel.tensor.size": 1, "parallel.pipeline.size": 2,
}  # fmt: skip


def main() -> None:
    directory, how, device = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    backward, times = executor._StepState._backward, 0

    def fatal(self: executor._StepState, action: Action) -> None:
        nonlocal times
        times += action == FATAL
        if times == 3:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        backward(self, action)

    executor._StepState._backward = fatal  # type: ignore[method-assign]
    flags = [f"--{key}={value}" for key, value in (OPTIONS | DEVICES[device]).items()]
    places = [f"--log.directory={directory / 'run'}", f"--data.cache={directory / 'cache'}"]
    sys.argv = ["cai", "train", "llama-tiny", *flags, *places]
    sys.exit(cai())


if __name__ == "__main__":
    main()
