"""The sections of every run: one dataclass per section of the TOML file, the same ones the command line fills.

A default is what a run gets when neither says otherwise. `None` means "worked out before the ranks start"
(`cai_apps.config.validation.resolve`); the config.toml of a run directory holds the values that were worked out.
An application adds sections of its own (`cai_apps.applications.language.config`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

from cai_apps.config.optimizer import Optimizer
from cai_apps.config.ranges import COUNT, FILLED, NATURAL, PART, SEED, SHARE, Range

DEGREE = Annotated[int, COUNT]
Tracker = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True)
class Tensor:
    mode: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    """Algorithm that splits the matrix products. 1d cuts features within a layer; the others cut samples and features
    from the embedding to the head: 2d on q x q ranks, 2.5d on depth x q x q, 3d on l x l x l."""
    size: DEGREE = 1
    """Tensor-parallel degree."""
    depth: Annotated[int | None, COUNT] = None
    """Number of grids of mode 2.5d that hold the same weights; None: 2."""
    sequence: bool = False
    """Cut along the sequence what tensor-parallel ranks hold alike: norms, residuals, and what is kept of them."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Multiply part of the tokens while others travel, with `sequence`; auto: on the GPUs of one host, without
    recompute."""


@dataclass(frozen=True)
class Context:
    size: DEGREE = 1
    """Ranks that have each row of tokens together: a part of its tokens each, whole parameters, which ZeRO shards over
    them too."""
    mode: Literal["gather", "ulysses", "ring"] = "gather"
    """How attention sees whole rows. gather: keys and values come to every rank. ulysses: ranks exchange tokens for
    heads. ring: keys and values go from rank to rank, and none has them whole; layers with a window gather them."""


@dataclass(frozen=True)
class ExpertRanks:
    size: DEGREE = 1
    """Ranks over which the experts of each layer are spread; each has a part of them, and tokens travel. They are ranks
    of `shard`, `context` and `tensor`."""


@dataclass(frozen=True)
class Pipeline:
    size: DEGREE = 1
    """Pipeline ranks."""
    chunks: DEGREE = 1
    """Pipeline stages of each rank."""
    schedule: Literal[
        "gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "v-half", "v-min", "dualpipe-v", "auto"
    ] = "1f1b"
    """Order of the forward and backward passes. gpipe, 1f1b and zb-h1 are for one chunk; interleaved is 1f1b for
    several; zb-v, v-half, v-min and dualpipe-v are for two. bfs (breadth first) runs all microbatches through a stage
    before it begins with the next. Weight gradients of zb-h1 and of those for two chunks fill what would be idle;
    v-half and v-min keep half and a third of the activations of 1f1b. auto measures the second step and orders the
    passes anew for its times and the memory that is left; with two chunks the stages are placed in a V, the first and
    the last of them on the same rank."""
    balance: Annotated[tuple[int, ...], COUNT] = ()
    """Layers of each stage, in the order of the stages. Empty: as many as make ranks cost alike, counted in parameters
    of layers and head, of experts those that a token visits."""
    unshard: Literal["auto", "pass", "step"] = "auto"
    """How often ZeRO-3 gathers a stage's parameters. pass: for every forward and backward of a layer. step:
    once, and its gradients are reduced once; both are whole on every rank meanwhile. auto: step where the schedule asks
    for it or the plan says that it fits."""
    wire: Literal["full", "fp8"] = "full"
    """What stages send each other, hidden states and their gradients. fp8: a byte an element and a scale a token, which
    rounds both."""
    microbatches: Annotated[int | None, COUNT] = None
    """Microbatches of a data rank in one step; None: global_batch / (data ranks * microbatch_size)."""


@dataclass(frozen=True)
class Parallel:
    replicate: DEGREE = 1
    """Data-parallel groups that each hold every shard (dp_replicate)."""
    shard: Annotated[int, Range(least=-1)] = 1
    """Data ranks that ZeRO shards over (dp_shard); -1: all ranks the other degrees leave."""
    zero: Literal["auto", 0, 1, 2, 3] = 1
    """ZeRO stage: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters are sharded. auto: the first of 1, 2
    and 3 whose plan fits the device, which is the fastest."""
    copy_engines: Literal["auto", "on", "off"] = "auto"
    """Gather and reduce by copies between the GPUs of one host, not by NCCL; auto: where all ranks are on one host."""
    wire_weights: Literal["full", "int8", "fp8"] = "full"
    """What weights are gathered as (ZeRO++, arXiv:2306.10209): full precision, or a byte an element and a scale a
    block. For ranks that share chunks (shard > 1), stages 1 to 3."""
    wire_gradients: Literal["full", "int8", "fp8"] = "full"
    """What gradients are reduced as; what rounding takes from one is added to the next."""
    tensor: Tensor = field(default_factory=Tensor)
    context: Context = field(default_factory=Context)
    experts: ExpertRanks = field(default_factory=ExpertRanks)
    pipeline: Pipeline = field(default_factory=Pipeline)

    @property
    def zero_ranks(self) -> int:
        """Ranks over which ZeRO shards, `shard` being resolved: data ranks, and those that have rows together."""
        return self.shard * self.context.size


@dataclass(frozen=True)
class Memory:
    residency: Literal["device", "host", "auto", "nvme"] = "device"
    """Where parameters, gradients and optimizer state live between uses. auto: as much on the device as makes steps
    short, planned from traced steps; host: there; nvme: in files. On several ranks with ZeRO-3."""
    device_memory: int | str | None = None
    """What a rank may use of its device, in bytes or as "22GB" (10^9) or "22GiB"; None: all of it."""
    host_memory: int | str | None = None
    """What a rank may use of host memory for training state; more goes to `nvme` or is refused. None: no limit."""
    nvme: Annotated[str | None, FILLED] = None
    """Directory on a disk for optimizer state and weights that have no room in host memory."""
    recompute: Literal["auto", "none", "selective", "most", "full"] = "none"
    """What backward runs again. auto: the first of the others whose plan fits the device; none on CPUs. selective:
    what costs little for its bytes; results of matrix products and of attention are kept. most: all but attention,
    which costs most where sequences are long. full: all of a block, of which only the input is kept."""
    activations: Literal["device", "host"] = "device"
    """Where the inputs of blocks, which full recompute keeps, are stored until backward."""


@dataclass(frozen=True)
class Precision:
    compute: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Dtype of forward and backward. With bf16 and fp16 the master weights and optimizer state are fp32. With fp16 the
    loss is scaled: a step whose gradients overflow is left out, and the scale halved."""
    master: Literal["auto", "whole", "split"] = "auto"
    """How master weights are kept in ZeRO stages 0 to 2 with bf16. split: as the parameters and the 16 bits that those
    lack, which takes 2 bytes an element and not 4; the numbers are the same. auto: split where AdamW's kernel steps
    them so, unless there is a moving average."""
    linear: Literal["compute", "fp8"] = "compute"
    """fp8: linear layers, but for the output layer, multiply in FP8, forward and backward, with a current scale a
    row. Needs a GPU of compute capability 8.9 (Ada, Hopper); on a CPU it is emulated, slowly."""


@dataclass(frozen=True)
class LrSchedule:
    """Linear warmup to the peak, then half a cosine down to `floor` times the peak."""

    warmup_steps: Annotated[int | None, NATURAL] = None
    """Steps until the peak is reached; None: 10, or all of a shorter run."""
    decay_steps: Annotated[int | None, COUNT] = None
    """Step at which the floor is reached; None: the run's last step."""
    floor: Annotated[float, SHARE] = 0.1
    """Final learning rate as a fraction of the peak."""


@dataclass(frozen=True)
class Train:
    steps: Annotated[int, COUNT] = 100
    """Optimizer steps of the whole run, steps before a resume included."""
    global_batch: Annotated[int, COUNT] = 8
    """Samples (sequences, images) of one optimizer step, over all data ranks."""
    microbatch_size: Annotated[int, COUNT] = 1
    """Samples of one forward pass of a data rank."""
    seed: Annotated[int, SEED] = 0
    """Seed of weights, data order and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs when the machine has enough of them for the mesh, else the CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of every block; auto: on GPUs only."""
    kernels: Literal["auto", "on", "off"] = "auto"
    """cai_kernels in place of norms, rotary embeddings, gated activations, layers of experts and the loss, and the
    fastest of torch's operators for attention; auto: on GPUs; where blocks are compiled, only for attention, experts
    and the loss, whose logits are then never whole."""
    validate_every: Annotated[int, NATURAL] = 0
    """Steps between validations; 0: none."""
    validation_batches: Annotated[int, COUNT] = 4
    """Global batches of one validation."""


@dataclass(frozen=True)
class Checkpoint:
    minutes: Annotated[float, Range(least=0)] = 15.0
    """Minutes between checkpoints on the way; 0: none by time. Where the disk has no room, a line says that one is left
    out."""
    every: Annotated[int, NATURAL] = 0
    """Steps between further checkpoints; 0: none by steps."""
    final: bool = True
    """Write a checkpoint after the last step; a disk that has no room for it is refused before the first."""
    background: Literal["auto", "on", "off"] = "auto"
    """Copy what a rank writes to host memory and write it while training goes on; auto: where the copies fit there. The
    checkpoint after the last step is waited for at once."""
    keep_last: Annotated[int | None, COUNT] = 2
    """Newest checkpoints to keep. 1 keeps 2: the newest is proven by the step after it, which may show that it leads to
    numbers that are not finite; the run then goes on from the one before. None: all."""
    best: bool = False
    """Keep the checkpoint of the lowest validation loss, too, in best/ of the run directory; `keep_last` does not count
    it. Commands that take a model take RUN/best."""
    resume: Annotated[str, FILLED] = "auto"
    """auto: from the run directory's newest checkpoint that verifies, if it has any; never; or the directory of a
    checkpoint or of checkpoints."""


@dataclass(frozen=True)
class EarlyStopping:
    patience: Annotated[int, NATURAL] = 0
    """Validations in a row without an improvement after which the run ends, as if its last step was done; 0: it does
    not."""
    min_delta: Annotated[float, NATURAL] = 0.0
    """What a validation loss must be lower than the lowest before it by, at least, to be an improvement."""


@dataclass(frozen=True)
class Log:
    directory: Annotated[str | None, FILLED] = None
    """Run directory; None: runs/<recipe or file name>-<time>."""
    every: Annotated[int, COUNT] = 10
    """Steps between printed lines where the output is not a terminal."""
    trackers: tuple[Tracker, ...] = ()
    """Where the first rank writes numbers, texts and the config beside metrics.jsonl, each an extra of cai-apps. They
    take their own variables of the environment (WANDB_MODE=offline, TRACKIO_DIR). One that fails stops no run."""
    project: Annotated[str | None, FILLED] = None
    """Project of wandb and trackio; None: that of WANDB_PROJECT and TRACKIO_PROJECT, or "cai"."""
    trace: Annotated[str | None, FILLED] = None
    """Steps whose operators are traced over time, as "10" or "10-12", into traces/ of the run directory."""
    snapshot: Annotated[str | None, FILLED] = None
    """Steps, named so, after which a snapshot of a GPU's memory is put into snapshots/; `cai report` shows what was
    largest when most was taken, with the lines of code. Where memory runs out, any rank leaves one."""
    trace_ranks: Annotated[tuple[int, ...], NATURAL] = (0,)
    """Ranks that `trace` and `snapshot` are about."""


BaseKind = Literal["compute", "nf4", "int8"]
"""What frozen weights are kept in: the dtype of `precision.compute`, or codes with scales."""


@dataclass(frozen=True)
class LoRA:
    """Adapters beside frozen weights (arXiv:2106.09685), of applications that offer them."""

    rank: Annotated[int, NATURAL] = 0
    """Columns of each adapter; 0: there are none, and all weights are trained."""
    alpha: Annotated[int | None, COUNT] = None
    """What an adapter adds is scaled by alpha / rank; None: alpha is the rank."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732), so that a large rank learns as fast."""
    targets: tuple[str, ...] = ()
    """Layers with an adapter, by their names or the ends of them; empty: of a diffusion model the projections of
    attention, of any other all linear layers of its blocks."""
    dropout: Annotated[float, PART] = 0.0
    """Part of its inputs that an adapter drops in training."""
    dora: bool = False
    """Learn the length of each row of a linear layer as well (DoRA, arXiv:2402.09353); not of diffusion models."""


@dataclass(frozen=True)
class Experts:
    """How routers of a mixture of experts are balanced and shown, of applications whose models may have them."""

    aux_loss: Annotated[float | None, NATURAL] = None
    """Coefficient of the load-balancing loss (arXiv:2101.03961), of all layers together, as transformers has it; None:
    the model's router_aux_loss_coef where its config.json says output_router_logits, else 0."""
    z_loss: Annotated[float, NATURAL] = 0.0
    """Coefficient of the router z loss (arXiv:2202.08906), usually 0.001."""
    bias_update: Annotated[float, NATURAL] = 0.0
    """Rate at which the bias that corrects a router's choice moves against loads in each step (arXiv:2408.15664),
    usually 0.001; for models that have one, as DeepSeek-V3. 0: it stays."""
    router_dtype: Literal["compute", "float32"] = "compute"
    """Dtype in which routers multiply and take their softmax."""
    show: bool = False
    """Print the load of the busiest expert beside the loss."""


class Logged(Protocol):
    """Any config whose run has a directory."""

    @property
    def log(self) -> Log: ...


@dataclass(frozen=True)
class RunConfig:
    """What the loop, the transforms and the planner read of a config, whatever its application."""

    parallel: Parallel = field(default_factory=Parallel)
    memory: Memory = field(default_factory=Memory)
    precision: Precision = field(default_factory=Precision)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_schedule: LrSchedule = field(default_factory=LrSchedule)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    log: Log = field(default_factory=Log)
