"""GPU kernels interpreted lane by lane: the kernel's text compiled as C++, each lane a fiber.

Lanes run one after the other between two meeting points (shuffles and barriers), which is all that the
kernels may rely on. Both preludes are used as they are, on shims of the words that they need.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from millrace.paging import kernel_text as text

Array = NDArray[np.generic]

_SHIM = r"""
#include <ucontext.h>
#include <cmath>
#include <cstring>
#include <algorithm>
#include <vector>
typedef unsigned short ushort;
struct Dim { unsigned x, y, z; };
static Dim block_at, blocks_in_all;
static unsigned lane_at;
static int lanes_in_all;
static ucontext_t home;
static std::vector<ucontext_t> fibers;
static std::vector<bool> over;
static std::vector<float> passed;
static int arrived, barriers;
static void meet() { const unsigned me = lane_at; swapcontext(&fibers[me], &home); lane_at = me; }
static float shuffled(float x, unsigned n) {
  const unsigned me = lane_at;
  passed[me] = x; meet();
  const float got = passed[(me & ~31u) | ((me & 31u) ^ n)]; meet();
  return got;
}
static void block_barrier() {
  const int mine = barriers;
  if (++arrived == lanes_in_all) { arrived = 0; ++barriers; }
  while (barriers == mine) meet();
}
"""

_CUDA = r"""
#define __shared__ static
#define __device__ static
#define __syncthreads() block_barrier()
#define __shfl_xor_sync(mask, x, n) shuffled(x, n)
#define blockIdx block_at
#define gridDim blocks_in_all
static struct { struct { operator unsigned() const { return lane_at; } } x; } threadIdx;
"""

_METAL = r"""
#define device
#define threadgroup static
enum class mem_flags { mem_threadgroup };
static void threadgroup_barrier(mem_flags) { block_barrier(); }
static float simd_shuffle_xor(float x, ushort n) { return shuffled(x, n); }
#define threadgroup_position_in_grid block_at
#define threadgroups_per_grid blocks_in_all
#define thread_index_in_threadgroup ((int)lane_at)
namespace metal {
using std::exp2; using std::max;
namespace precise { using std::tanh; }
}
"""

_CTYPES = {"float32": "float", "int32": "int"}


def interpret(
    backend: str,
    source: str,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    template: Mapping[str, int],
    blocks: Sequence[int],
    lanes: int,
    folder: Path,
) -> None:
    """Run a kernel over all its blocks; it writes into `outputs`, and into inputs where it does so."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    names = [*inputs, *outputs]
    arrays = [*inputs.values(), *outputs.values()]
    library = _library(compiler, backend, source, names, inputs, outputs, template, folder)
    kernel = ctypes.CDLL(str(library)).run
    shapes = [np.array(a.shape, np.int32) for a in arrays]
    strides = [np.array([s // a.itemsize for s in a.strides], np.int64) for a in arrays]

    def pointers(values: Sequence[Array]) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values))

    kernel(pointers(arrays), pointers(shapes), pointers(strides), *blocks, lanes)


def _library(
    compiler: str,
    backend: str,
    source: str,
    names: Sequence[str],
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    template: Mapping[str, int],
    folder: Path,
) -> Path:
    shim = _CUDA if backend == "cuda" else _METAL
    prelude = text.CUDA_PRELUDE if backend == "cuda" else text.METAL_PRELUDE
    prelude = "\n".join(line for line in prelude.splitlines() if "#include" not in line)
    constants = "".join(f"constexpr int {name} = {value};\n" for name, value in template.items())
    arguments = ""
    for place, name in enumerate(names):
        kind = _CTYPES[str((inputs.get(name) if name in inputs else outputs[name]).dtype)]  # type: ignore[union-attr]
        const = "const " if name in inputs else ""
        arguments += f"  {const}{kind}* {name} = ({const}{kind}*)data[{place}];\n"
        arguments += (
            f"  const int* {name}_shape = (const int*)shapes[{place}]; (void){name}_shape;\n"
        )
        arguments += (
            f"  const long* {name}_strides = (const long*)strides[{place}]; (void){name}_strides;\n"
        )
    program = f"""{_SHIM}{shim}{prelude}
using T = float;
{text.PACK}{constants}
static void **data, **shapes, **strides;
static void kernel() {{
{arguments}{source}
}}
static void lane(int n) {{ lane_at = n; kernel(); over[n] = true; }}
extern "C" void run(void** d, void** s, void** t, int x, int y, int z, int lanes) {{
  data = d; shapes = s; strides = t; lanes_in_all = lanes;
  blocks_in_all = {{(unsigned)x, (unsigned)y, (unsigned)z}};
  std::vector<std::vector<char>> stacks(lanes, std::vector<char>(1 << 16));
  for (unsigned bz = 0; bz < (unsigned)z; ++bz) for (unsigned by = 0; by < (unsigned)y; ++by)
  for (unsigned bx = 0; bx < (unsigned)x; ++bx) {{
    block_at = {{bx, by, bz}};
    fibers.assign(lanes, ucontext_t()); over.assign(lanes, false); passed.assign(lanes, 0.f);
    arrived = 0;
    for (int n = 0; n < lanes; ++n) {{
      getcontext(&fibers[n]);
      fibers[n].uc_stack.ss_sp = stacks[n].data(); fibers[n].uc_stack.ss_size = stacks[n].size();
      fibers[n].uc_link = &home;
      makecontext(&fibers[n], (void (*)())lane, 1, n);
    }}
    for (bool any = true; any;) {{
      any = false;
      for (int n = 0; n < lanes; ++n)
        if (!over[n]) {{ any = true; lane_at = n; swapcontext(&home, &fibers[n]); }}
    }}
  }}
}}
"""
    name = hashlib.sha256(program.encode()).hexdigest()[:16]
    path, library = folder / f"{name}.cpp", folder / f"{name}.so"
    path.write_text(program, encoding="utf-8")
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-O1",
            "-shared",
            "-fPIC",
            "-Wno-unused",
            str(path),
            "-o",
            str(library),
        ],
        check=True,
    )
    return library
