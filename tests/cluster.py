"""A cluster for tutorials on one machine: commands of SLURM as scripts, and pods as processes.

Nodes are this machine by its loopback address, and a job's variables those that SLURM's manual and Kubernetes' promise.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

SBATCH = r"""#!/bin/bash
# sbatch --wait SCRIPT ARGUMENTS: reads the script's #SBATCH lines and runs it as its first node would
set -eu
[ "$1" = --wait ] && shift
script=$1; shift
option() { sed -n "s/^#SBATCH --$1=//p" "$script"; }
number=$((1000 + RANDOM % 8000))
export SLURM_JOB_ID=$number SLURM_JOB_NODELIST="node[1-$(option nodes)]" SLURM_NNODES=$(option nodes)
export SLURM_PROCID=0 SLURM_NTASKS=$(($(option nodes) * $(option ntasks-per-node)))
output=$(option output); output=${output//%j/$number}
echo "Submitted batch job $number"
status=0
bash "$script" "$@" > "$output" 2>&1 || status=$?
cat "$output"
exit $status
"""
SRUN = r"""#!/bin/bash
# srun --ntasks-per-node=N COMMAND: the command once for each task, with the variables of a step
set -eu
[[ "$1" == --ntasks-per-node=* ]] || { echo "srun: unknown option $1"; exit 1; }
each=${1#*=}; shift
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$((SLURM_NNODES * each))
status=0; tasks=()
for ((task = 0; task < SLURM_STEP_NUM_TASKS; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=$((task % each)) SLURM_NODEID=$((task / each)) "$@" &
  tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit $status
"""
SCONTROL = """#!/bin/bash
[ "$1 $2" = "show hostnames" ] && [ -n "$3" ] || exit 1
for ((node = 0; node < SLURM_NNODES; node++)); do echo localhost; done
"""


def install_slurm(folder: Path) -> None:
    """Put the three commands into a folder's `bin`, where `follow` looks first."""
    (folder / "bin").mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)


def expand(texts: list[str], variables: dict[str, str]) -> list[str]:
    """Return a container's command with $(NAME) filled in, as the kubelet does."""
    return [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], text) for text in texts]


def run_pods(job: dict[str, Any], folder: Path, replaced: dict[str, str], path: str) -> str:
    """Run the pods of an indexed Job as processes of this machine; return what they print.

    Args:
        job: the manifest.
        folder: the folder to run in.
        replaced: texts of the command that a cluster would give a meaning: names of pods, mounts.
        path: PATH of the processes.
    """
    container = job["spec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each["value"] for each in container["env"]}
    command = expand(container["command"] + container["args"], variables)
    for old, new in replaced.items():
        command = [text.replace(old, new) for text in command]
    pods = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | variables | {"JOB_COMPLETION_INDEX": str(index), "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(job["spec"]["completions"])
    ]
    printed = [pod.communicate(timeout=500)[0] for pod in pods]
    assert not any(pod.returncode for pod in pods), "\n".join(printed)[-4000:]
    return "\n".join(printed)
