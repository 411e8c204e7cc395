"""Thresholds against the definition: sort, add up, cut."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.sampling import _filtered, candidates
from millrace.protocol import Sampling

rows = st.lists(st.floats(-12, 0), min_size=2, max_size=60).map(
    lambda xs: np.exp(np.array(xs, np.float32) - max(xs)).astype(np.float32)
)


def _kept(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    order = np.argsort(-row, kind="stable")
    kept = [i for i in order if row[i] >= np.float32(min_p) * row.max()]
    if 0 < top_k < row.size:
        least = row[order[top_k - 1]]
        kept = [i for i in kept if row[i] >= least]
    if top_p < 1.0:
        total, mass, cut = row[kept].sum(dtype=np.float64), 0.0, []
        for i in kept:
            cut.append(i)
            mass += float(row[i])
            if mass >= top_p * total:
                break
        kept = [i for i in kept if row[i] >= row[cut[-1]]]
    return set(kept)


@settings(max_examples=200, deadline=None)
@given(
    rows,
    st.integers(0, 12),
    st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.1]),
)
def test_both_backends_keep_what_the_definition_keeps(
    row: np.ndarray, top_k: int, top_p: float, min_p: float
) -> None:
    wanted = _kept(row, top_k, top_p, min_p)
    sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    ids, weights = candidates(np.log(row), sampling)
    on_host = set(range(row.size)) if ids is None else set(ids[weights > 0].tolist())
    on_device = set(
        np.flatnonzero(np.array(_filtered(mx.array(row)[None], [sampling]))[0]).tolist()
    )
    for kept in (on_host, on_device):
        # Where the mass meets the share within rounding, one more or less token is right too.
        if kept != wanted:
            extra = kept ^ wanted
            mass = row[list(kept & wanted)].sum() / row[list(wanted)].sum()
            assert len({float(row[i]) for i in extra}) == 1
            assert mass > 0.999 or abs(mass - top_p) < 1e-5
