"""The text of the GPU kernels: one text, with a prelude for CUDA and one for Metal.

`WRITE` puts the keys and values of a pass's tokens into their pages. `ATTEND` computes attention of each
token over its sequence's pages; with several splits, each takes a part of the keys, and `COMBINE` puts the
parts together. Threads of a warp stay together: no shuffle is under a condition that lanes decide apart.

The kernels write into their inputs, which MLX does not know of: an int32 `chain` that each takes and hands
on orders them.

Queries, new keys and new values come as models have them, [rows, heads, columns, size], in any strides;
token n is row n / columns, column n % columns. What `ATTEND` gives has the same shape.

Layout of `ATTEND`: a block is one token, `GB` query heads of one key head and one split; 8 lanes share a
key, each with an eighth of its elements, so that a warp has 4 keys at a time and a block 16.
"""

from __future__ import annotations

CUDA_PRELUDE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define DEVICE
#define SHARED __shared__
#define BARRIER __syncthreads()
#define SHUFFLE(x, n) __shfl_xor_sync(0xffffffffu, x, n)
#define BLOCK_X blockIdx.x
#define BLOCK_Y blockIdx.y
#define BLOCK_Z blockIdx.z
#define BLOCKS_Z gridDim.z
#define THREAD threadIdx.x
#define EXP2(x) exp2f(x)
#define TANH(x) tanhf(x)
#define MAXF(a, b) fmaxf(a, b)
template <typename T> __device__ inline float to_float(T x) { return static_cast<float>(x); }
template <typename T> __device__ inline T from_float(float x) { return static_cast<T>(x); }
"""

METAL_PRELUDE = r"""
#define DEVICE device
#define SHARED threadgroup
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define SHUFFLE(x, n) simd_shuffle_xor(x, ushort(n))
#define BLOCK_X threadgroup_position_in_grid.x
#define BLOCK_Y threadgroup_position_in_grid.y
#define BLOCK_Z threadgroup_position_in_grid.z
#define BLOCKS_Z threadgroups_per_grid.z
#define THREAD thread_index_in_threadgroup
#define EXP2(x) metal::exp2(x)
#define TANH(x) metal::precise::tanh(x)
#define MAXF(a, b) metal::max(a, b)
template <typename T> inline float to_float(T x) { return static_cast<float>(x); }
template <typename T> inline T from_float(float x) { return static_cast<T>(x); }
"""

PACK = r"""
template <int B> struct Alignment { enum { of = B % 16 == 0 ? 16 : B % 8 == 0 ? 8 : B % 4 == 0 ? 4 : 2 }; };
template <typename T, int N> struct alignas(Alignment<N * sizeof(T)>::of) Pack { T at[N]; };
"""

WRITE = r"""
  const int token = BLOCK_X, head = BLOCK_Y;
  const int columns = keys_shape[2], column = token % columns, line = token / columns;
  const long row = (long)slots[token] * HK + head;
  const long key = line * keys_strides[0] + head * keys_strides[1] + column * keys_strides[2];
  const long value = line * values_strides[0] + head * values_strides[1] + column * values_strides[2];
  DEVICE T* to_keys = (DEVICE T*)pool_keys;
  DEVICE T* to_values = (DEVICE T*)pool_values;
  for (int i = THREAD; i < D; i += 32) to_keys[row * D + i] = keys[key + i * keys_strides[3]];
  for (int i = THREAD; i < DV; i += 32) to_values[row * DV + i] = values[value + i * values_strides[3]];
  if (token == 0 && head == 0 && THREAD == 0) done[0] = chain[0] + 1;
"""

ATTEND = r"""
  const int token = BLOCK_X, split = BLOCK_Z, splits = BLOCKS_Z;
  const int head = BLOCK_Y / (G / GB), first = head * G + (BLOCK_Y % (G / GB)) * GB;
  const int warp = THREAD / 32, lane = THREAD % 32, group = lane / 8, part = lane % 8;
  const int width = table_shape[1], columns = queries_shape[2], column = token % columns;
  const DEVICE int* pages = table + (long)sequence[token] * width;
  const int end = place[token] + 1;
  const int begin = (WINDOW > 0 && end > WINDOW) ? end - WINDOW : 0;
  const int each = (end - begin + splits - 1) / splits;
  const int from = begin + split * each;
  const int to = from + each < end ? from + each : end;
  const float scale = rule[0] * 1.44269504f, cap = rule[1];
  constexpr int E = D / 8, EV = DV / 8;
  float q[GB][E], acc[GB][EV], top[GB], sum[GB];
  for (int g = 0; g < GB; ++g) {
    const long at = (token / columns) * queries_strides[0] + (first + g) * queries_strides[1] +
                    column * queries_strides[2];
    for (int i = 0; i < E; ++i)
      q[g][i] = to_float(queries[at + (part * E + i) * queries_strides[3]]) * scale;
    for (int i = 0; i < EV; ++i) acc[g][i] = 0.f;
    top[g] = -1e30f; sum[g] = 0.f;
  }
  for (int j0 = from + warp * 4; j0 < to; j0 += WARPS * 4) {
    const int j = j0 + group;
    const bool live = j < to;
    const int key = live ? j : to - 1;
    const long row = ((long)pages[key / PAGE] * PAGE + key % PAGE) * HK + head;
    static_assert(sizeof(Pack<T, E>) == E * sizeof(T) && sizeof(Pack<T, EV>) == EV * sizeof(T), "");
    const Pack<T, E> k = *(const DEVICE Pack<T, E>*)(pool_keys + row * D + part * E);
    const Pack<T, EV> v = *(const DEVICE Pack<T, EV>*)(pool_values + row * DV + part * EV);
    for (int g = 0; g < GB; ++g) {
      float dot = 0.f;
      for (int i = 0; i < E; ++i) dot += q[g][i] * to_float(k.at[i]);
      dot += SHUFFLE(dot, 1);
      dot += SHUFFLE(dot, 2);
      dot += SHUFFLE(dot, 4);
      if (cap > 0.f) dot = cap * 1.44269504f * TANH(dot / (cap * 1.44269504f));
      if (!live) dot = -1e30f;
      const float higher = MAXF(top[g], dot);
      const float old = EXP2(top[g] - higher), now = live ? EXP2(dot - higher) : 0.f;
      top[g] = higher;
      sum[g] = sum[g] * old + now;
      for (int i = 0; i < EV; ++i) acc[g][i] = acc[g][i] * old + now * to_float(v.at[i]);
    }
  }
  SHARED float tops[WARPS][GB];
  SHARED float sums[WARPS][GB];
  SHARED float accs[WARPS][GB][DV];
  for (int g = 0; g < GB; ++g) {
    for (int n = 8; n <= 16; n *= 2) {
      const float other = SHUFFLE(top[g], n), more = SHUFFLE(sum[g], n);
      const float higher = MAXF(top[g], other);
      const float a = EXP2(top[g] - higher), b = EXP2(other - higher);
      sum[g] = sum[g] * a + more * b;
      for (int i = 0; i < EV; ++i) acc[g][i] = acc[g][i] * a + SHUFFLE(acc[g][i], n) * b;
      top[g] = higher;
    }
    if (group == 0) {
      for (int i = 0; i < EV; ++i) accs[warp][g][part * EV + i] = acc[g][i];
      if (part == 0) { tops[warp][g] = top[g]; sums[warp][g] = sum[g]; }
    }
  }
  BARRIER;
  for (int n = THREAD; n < GB * DV; n += WARPS * 32) {
    const int g = n / DV, i = n % DV;
    float higher = tops[0][g];
    for (int w = 1; w < WARPS; ++w) higher = MAXF(higher, tops[w][g]);
    if (SINKS && split == 0) higher = MAXF(higher, to_float(sinks[first + g]) * 1.44269504f);
    float total = 0.f, value = 0.f;
    for (int w = 0; w < WARPS; ++w) {
      const float share = EXP2(tops[w][g] - higher);
      total += sums[w][g] * share;
      value += accs[w][g][i] * share;
    }
    if (SINKS && split == 0) total += EXP2(to_float(sinks[first + g]) * 1.44269504f - higher);
    const long row = ((long)(token / columns) * HK * G + first + g) * columns + column;
    if (SPLIT) {
      const long at = row * splits + split;
      parts[at * DV + i] = value;
      if (i == 0) { bounds[at * 2] = higher; bounds[at * 2 + 1] = total; }
    } else {
      out[row * DV + i] = from_float<T>(value / total);
    }
  }
  if (token == 0 && BLOCK_Y == 0 && split == 0 && THREAD == 0) next[0] = chain[0];
"""

COMBINE = r"""
  const long row = BLOCK_X;
  const int splits = bounds_shape[1];
  float higher = bounds[row * splits * 2];
  for (int s = 1; s < splits; ++s) higher = MAXF(higher, bounds[(row * splits + s) * 2]);
  for (int i = THREAD; i < DV; i += 32) {
    float total = 0.f, value = 0.f;
    for (int s = 0; s < splits; ++s) {
      const float share = EXP2(bounds[(row * splits + s) * 2] - higher);
      total += bounds[(row * splits + s) * 2 + 1] * share;
      value += parts[(row * splits + s) * DV + i] * share;
    }
    out[row * DV + i] = from_float<T>(value / total);
  }
"""
