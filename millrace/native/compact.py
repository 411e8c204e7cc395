"""Weights that MLX cannot hold, or not as small, in a file of their own beside the model's.

A matrix's arrays are named after its module and its type in GGUF, as in `lm_head.Q6_K.scales`. A weight is
scale_factor * scale * (code - zero), less minimum_factor * minimum where there are minima. Whoever converts
a model writes this file, so nothing here needs MLX.
"""

from __future__ import annotations

from dataclasses import dataclass

STEM = "packed"
"""Files are named after this; mlx-lm reads those that are named after 'model'."""
SPAN = 256
"""Inputs that share factors."""


@dataclass(frozen=True)
class Kind:
    """How one of GGUF's types is held."""

    bits: int
    group: int
    zero: int = 0
    minima: bool = False
    own_codes: bool = True
    """Whether codes are here; those of other types are the same as in MLX's file."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of a matrix's arrays."""
        codes = ("codes",) if self.own_codes else ()
        minima = ("minima", "minimum_factors") if self.minima else ()
        return (*codes, "scales", "scale_factors", *minima)


KINDS = {
    "Q2_K": Kind(bits=2, group=16, minima=True),
    "Q3_K": Kind(bits=4, group=16, zero=4),
    "Q4_K": Kind(bits=4, group=32, minima=True, own_codes=False),
    "Q5_K": Kind(bits=5, group=32, minima=True, own_codes=False),
    "Q6_K": Kind(bits=6, group=16, zero=32),
}
"""Codes are words of 32 bits in a row, lowest bits first; scales and minima have 8 bits and a sign; factors
are float16, one for 256 inputs."""
