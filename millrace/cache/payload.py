"""What the disk tier stores: named arrays of plain bytes with their shapes, and a line of text.

Pure data between the engine's thread, which makes and uses them, and the threads that write and read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass
class Payload:
    arrays: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    meta: str = ""
    """For whoever made it: how to read the arrays."""

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())
