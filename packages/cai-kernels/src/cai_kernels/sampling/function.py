"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.sampling import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE = (torch.int32, torch.int64)
MAX_COLUMNS = 2**24  # counts of tokens are exact in float32 up to here
_RANGES = {
    "temperature": (0.0, float("inf")),
    "top_k": (0, MAX_COLUMNS),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, float("inf")),
}


def sample(
    logits: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    repetition_penalty: float | torch.Tensor = 1.0,
    seen: torch.Tensor | None = None,
    seed: int | torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Draw a token a row from `softmax(logits / temperature)`, of the tokens that pass every filter.

    In this order: the repetition penalty, the `top_k` largest logits, of these the fewest largest that hold `top_p` of
    their probability (Holtzman et al., arXiv:1904.09751), the ones of at least `min_p` times the largest probability
    (Nguyen et al., arXiv:2407.01082). Logits equal to the last one kept are kept too. The draw is the largest of
    logits plus Gumbel noise; the noise is a function of the seed, the row and the token (Philox, Salmon et al.,
    SC 2011), so both backends draw the same tokens but where rounding decides.

    Args:
        logits: [B, V], float32, bfloat16 or float16 (the reference takes float64 too), any row stride, no NaN; V from 1
            to 2**24. A token at -inf is never drawn, unless all of its row are: then token 0 is.
        temperature: 0 or more; 0 takes the largest logit, the first of equal ones.
        top_k: 0 keeps all.
        top_p: 0 to 1; 0 keeps the largest only, 1 keeps all.
        min_p: 0 to 1; 0 keeps all.
        repetition_penalty: the logits of tokens `seen` are divided by it where positive, else multiplied (Keskar et
            al., arXiv:1909.05858); above 0.
        seen: [B, V] bool, needed with a repetition penalty.
        seed: an integer or a tensor of one int64 for all rows, or [B] int64, one a row: a row's token then depends on
            its own seed and logits only, not on its place. None draws one from `generator`, or from torch's own on the
            device of logits.
        generator: a generator of any device; not together with a seed.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Each of temperature, top_k, top_p, min_p and repetition_penalty is a number for all rows or a tensor [B] (top_k
    int32 or int64, the others floating), whose values are not checked.

    Returns [B] int64. Takes no gradient. One graph under torch.compile. Raises `KernelError` naming the argument that
    does not fit.
    """
    form = choose(backend, logits.device)
    _check_logits(logits, form)
    numbers = (temperature, top_k, top_p, min_p, repetition_penalty)
    limits = [_limit(name, value, logits) for name, value in zip(_RANGES, numbers, strict=True)]
    if not isinstance(repetition_penalty, torch.Tensor) and repetition_penalty == 1.0:
        seen = None
    else:
        _check_seen(seen, logits)
    seed = _seed(seed, generator, logits)
    if form == "reference":
        return reference.sample(logits, seen, seed, *limits)
    return _sample_in_triton(logits, seen, seed, limits)


def _sample_in_triton(
    logits: torch.Tensor,
    seen_mask: torch.Tensor | None,
    seed: torch.Tensor,
    limits: list[float | torch.Tensor],
) -> torch.Tensor:
    from cai_kernels.sampling import triton

    tensors = [value if isinstance(value, torch.Tensor) else None for value in limits]
    values = {
        f"{name}_value": 0.0 if isinstance(value, torch.Tensor) else float(value)
        for name, value in zip(_RANGES, limits, strict=True)
    }
    return triton.sample(logits, seen_mask, seed, *tensors, **values)


def _check_logits(logits: torch.Tensor, form: str) -> None:
    require("logits", logits, dtypes=_DTYPES if form == "triton" else (*_DTYPES, torch.float64))
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_COLUMNS:
        raise KernelError(
            "logits has a wrong shape", got=tuple(logits.shape), expected=f"[B, V], V from 1 to {MAX_COLUMNS}"
        )
    if torch.is_grad_enabled() and logits.requires_grad:
        raise KernelError("sample takes no gradient", got="logits requires grad", fix="torch.no_grad()")


def _limit(name: str, value: float | torch.Tensor, logits: torch.Tensor) -> float | torch.Tensor:
    """A number in its range, or a tensor [B] as float32 or int32."""
    if isinstance(value, torch.Tensor):
        dtypes = _WHOLE if name == "top_k" else (*_DTYPES, torch.float64)
        require(name, value, dtypes=dtypes, like=logits)
        if value.shape != logits.shape[:1]:
            raise KernelError(
                f"{name} does not fit logits",
                got=tuple(value.shape),
                expected=f"({logits.shape[0]},) or a number",
            )
        return value.to(torch.int32 if name == "top_k" else torch.float32).contiguous()
    low, high = _RANGES[name]
    within = low < value < high if name == "repetition_penalty" else low <= value <= high
    if not within or value == float("inf") or (name == "top_k" and value != int(value)):
        raise KernelError(f"{name} is out of range", got=value, expected=f"{low} to {high}, finite")
    return value


def _check_seen(seen_mask: torch.Tensor | None, logits: torch.Tensor) -> None:
    if seen_mask is None:
        raise KernelError(
            "a repetition penalty needs the tokens seen",
            got="seen=None",
            expected=f"seen {tuple(logits.shape)} bool",
        )
    require("seen", seen_mask, dtypes=(torch.bool,), like=logits)
    if seen_mask.shape != logits.shape:
        raise KernelError(
            "seen does not fit logits", got=tuple(seen_mask.shape), expected=tuple(logits.shape)
        )


def _seed(
    seed: int | torch.Tensor | None, generator: torch.Generator | None, logits: torch.Tensor
) -> torch.Tensor:
    """One int64 for all rows, [], or one a row, [B]."""
    if seed is None:
        device = logits.device if generator is None else generator.device
        drawn = torch.randint(0, 2**63 - 1, (), device=device, generator=generator)
        return drawn.to(logits.device, non_blocking=True)
    if generator is not None:
        raise KernelError(
            "seed and generator exclude each other", got=f"seed={seed}, generator={generator}", fix="give one"
        )
    if isinstance(seed, torch.Tensor):
        require("seed", seed, dtypes=(torch.int64,), like=logits)
        if seed.shape == logits.shape[:1]:
            return seed.contiguous()
        if seed.numel() != 1:
            raise KernelError(
                "seed does not fit logits",
                got=tuple(seed.shape),
                expected=f"one value or ({logits.shape[0]},)",
            )
        return seed.reshape(())
    if not -(2**63) <= seed < 2**63:
        raise KernelError("seed does not fit 64 bits", got=seed, expected="-2**63 to 2**63 - 1")
    return torch.full((), seed, dtype=torch.int64, device=logits.device)
