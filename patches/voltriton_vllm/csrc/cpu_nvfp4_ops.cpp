// The torch operator over the kernels, through torch's stable ABI; chooses the instruction set at run time.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include "cpu_nvfp4.h"

namespace {

using torch::stable::Tensor;
using Kernel = void (*)(const Problem&);

bool allowed(const char* name) {  // VOLTRITON_CPU_ISA: for tests of the narrower kernels
  const char* only = std::getenv("VOLTRITON_CPU_ISA");
  return only == nullptr || std::strcmp(only, name) == 0;
}

// Linux lets a process use AMX's registers once it has asked (5.16 and newer; asking again does no harm).
[[maybe_unused]] bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Kernel choose() {
  __builtin_cpu_init();
#ifdef WITH_AMX
  if (__builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("avx512bf16") && allowed("amx") && may_use_tiles())
    return amx::linear;
#endif
#ifdef WITH_AVX512BF16
  if (__builtin_cpu_supports("avx512bf16") && allowed("avx512bf16")) return avx512bf16::linear;
#endif
#ifdef WITH_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && allowed("avx512"))
    return avx512::linear;
#endif
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && allowed("avx2")) return avx2::linear;
  return nullptr;
}

Dtype dtype_of(const Tensor& x) {
  const auto type = x.scalar_type();
  if (type == torch::headeronly::ScalarType::Float) return Dtype::f32;
  if (type == torch::headeronly::ScalarType::BFloat16) return Dtype::bf16;
  STD_TORCH_CHECK(type == torch::headeronly::ScalarType::Half,
                  "x: allowed types are float32, bfloat16 and float16");
  return Dtype::f16;
}

// x [m, k] contiguous -> [m, n]
Tensor linear(const Tensor& x, const Tensor& words, const Tensor& scale, const Tensor& factor,
              const std::optional<Tensor>& bias, int64_t n) {
  static const Kernel kernel = choose();
  STD_TORCH_CHECK(kernel != nullptr, "this CPU has no AVX2 (or VOLTRITON_CPU_ISA names what it lacks)");
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "x: a contiguous matrix is needed");
  STD_TORCH_CHECK(dtype_of(factor) == Dtype::f32 && (!bias || dtype_of(*bias) == Dtype::f32),
                  "factor, bias: float32 is needed");
  const int64_t m = x.size(0), k = x.size(1);
  STD_TORCH_CHECK(k % 16 == 0 && words.numel() * 8 == factor.numel() * k &&
                      scale.numel() * 16 == factor.numel() * k && factor.numel() >= n,
                  "packed weight: its sizes do not fit x and n");
  Tensor y = torch::stable::new_empty(x, {m, n});
  if (m == 0) return y;
  Problem p{x.data_ptr(),
            static_cast<const uint32_t*>(words.data_ptr()),
            static_cast<const uint8_t*>(scale.data_ptr()),
            static_cast<const float*>(factor.data_ptr()),
            bias ? static_cast<const float*>(bias->data_ptr()) : nullptr,
            y.data_ptr(), m, n, k, dtype_of(x)};
  kernel(p);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY(voltriton_cpu, m) {
  m.def("nvfp4_linear(Tensor x, Tensor words, Tensor scale, Tensor factor, Tensor? bias, int n) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(voltriton_cpu, CPU, m) { m.impl("nvfp4_linear", TORCH_BOX(&linear)); }
