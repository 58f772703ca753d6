// y = x W^T + b with W in NVFP4, compiled once for each instruction set (ISA names the namespace).
#include "cpu_nvfp4_few.h"
#include "cpu_nvfp4_many.h"
#ifdef __AMX_BF16__
#include "cpu_nvfp4_amx.h"
#endif

namespace ISA {
namespace {

constexpr int64_t kFewRows = 12;  // up to here weights are decoded in registers

template <typename X>
void widen(const Problem& p, float* out) {
  const X* x = static_cast<const X*>(p.x);
#pragma omp parallel for schedule(static) if (p.m > kFewRows)
  for (int64_t row = 0; row < p.m; row++)
    for (int64_t i = row * p.k; i < (row + 1) * p.k; i += Vector::width) Vector::load(x + i).store(out + i);
}

template <typename W, typename X>
void multiply(const Problem& p, const X* x) {
  if (p.m > kFewRows) many_rows<X, W>(p, x);
  else few_all(p, x);
}

}  // namespace

void linear(const Problem& p) {
#ifdef __AMX_BF16__
  if (p.m >= amx_from(p.dtype)) {
    amx_linear(p);
    return;
  }
#endif
#ifdef __AVX512BF16__
  if (p.dtype == Dtype::bf16) {
    multiply<uint32_t>(p, static_cast<const uint16_t*>(p.x));
    return;
  }
#endif
  if (p.dtype == Dtype::f32) {
    multiply<float>(p, static_cast<const float*>(p.x));
    return;
  }
  Scratch<float> wide(p.m * p.k);
  if (p.dtype == Dtype::f16) widen<Half>(p, wide.at);
  else widen<Bfloat16>(p, wide.at);
  multiply<float>(p, static_cast<const float*>(wide.at));
}

}  // namespace ISA
