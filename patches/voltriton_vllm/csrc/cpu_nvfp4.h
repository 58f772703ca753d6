// NVFP4 linear layers on CPUs: what the kernels (one object file an instruction set) offer to the operator.
//
// Packed layout, made by voltriton_vllm/cpu/linear.py from a checkpoint's rows, for tiles of 16 output rows:
//   words  uint32 [tiles, K/8, 16]   the word of a row holds 8 weights: even columns in the low half, odd ones in
//                                    the high half, so that one shift brings a pair to look up in place
//   scale  uint8  [tiles, K/16, 16]  E4M3 of each group of 16 columns
//   factor float  [tiles * 16]       global scale of each row
// Rows beyond N are zero. It has the bytes of the checkpoint: 4.5 bits a weight.
#pragma once
#include <cstdint>

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };

struct Problem {
  const void* x;        // [m, k], row-major, of type `dtype`
  const uint32_t* words;
  const uint8_t* scale;
  const float* factor;
  const float* bias;    // [n] or null
  void* y;              // [m, n], row-major, of type `dtype`
  int64_t m, n, k;
  Dtype dtype;
};

namespace avx2 { void linear(const Problem&); }
namespace avx512 { void linear(const Problem&); }
namespace avx512bf16 { void linear(const Problem&); }
namespace amx { void linear(const Problem&); }
