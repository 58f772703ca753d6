// y = x W^T + b with W in NVFP4, compiled once for each instruction set (ISA names the namespace).
#include "cpu_nvfp4_few.h"
#ifdef __AMX_BF16__
#include "cpu_nvfp4_amx.h"
#else
#include "cpu_nvfp4_many.h"
#endif

namespace ISA {
namespace {

template <typename X>
void widen(const Problem& p, float* out) {
  const X* x = static_cast<const X*>(p.x);
  for (int64_t row = 0; row < p.m; row++)
    for (int64_t i = row * p.k; i < (row + 1) * p.k; i += Vector::width) Vector::load(x + i).store(out + i);
}

}  // namespace

void linear(const Problem& p) {
  if (p.m > few_up_to(p.dtype)) return many(p);
#ifdef __AVX512BF16__
  if (p.dtype == Dtype::bf16) return few_all(p, static_cast<const uint16_t*>(p.x));
#endif
  if (p.dtype == Dtype::f32) return few_all(p, static_cast<const float*>(p.x));
  Scratch<float> wide(p.m * p.k);
  if (p.dtype == Dtype::f16) widen<Half>(p, wide.at);
  else widen<Bfloat16>(p, wide.at);
  few_all(p, static_cast<const float*>(wide.at));
}

}  // namespace ISA
