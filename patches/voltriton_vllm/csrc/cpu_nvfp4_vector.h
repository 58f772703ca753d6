// What the kernels for one instruction set have in common: a vector of floats, decoding, conversions, results.
//
// E4M3 is decoded through half precision (its bits moved to half's places are the value times 2^-8); the
// factor 2^8 is taken into the row's factor.
#pragma once
#include "cpu_nvfp4.h"

#include <immintrin.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace ISA {
namespace {

constexpr int shift_of(int column) { return 16 * (column & 1) + 4 * (column >> 1); }  // in a word
constexpr int kTile = 16;        // output rows of a tile
constexpr float kE4m3 = 256.0f;  // see above
alignas(64) const float kE2m1[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                     -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

// Numbers of 16 bits, as memory only.
struct Half { uint16_t bits; };
struct Bfloat16 { uint16_t bits; };

inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Room for `count` values at a cache line's begin, not initialised.
template <typename T>
struct Scratch {
  explicit Scratch(int64_t count) : at(static_cast<T*>(std::aligned_alloc(64, up(count * sizeof(T) + 1, 64) * 64))) {
    if (!at) throw std::bad_alloc();
  }
  ~Scratch() { std::free(at); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* const at;
};

// Room of this thread for `count` values, kept for later calls: to give it back each time costs more page faults than
// the work is worth. It begins as zeros and holds what was last put there under this Name.
template <typename Name, typename T>
T* room(int64_t count) {
  static thread_local std::unique_ptr<Scratch<T>> kept;
  static thread_local int64_t size = 0;
  if (count > size) {
    kept.reset();
    kept.reset(new Scratch<T>(count));
    std::memset(kept->at, 0, count * sizeof(T));
    size = count;
  }
  return kept->at;
}

inline __m128i e4m3_to_half_bits(__m128i bytes) {  // 8 bytes -> 8 halves, times 2^-8
  __m128i w = _mm_cvtepu8_epi16(bytes);
  __m128i sign = _mm_slli_epi16(_mm_and_si128(w, _mm_set1_epi16(0x80)), 8);
  return _mm_or_si128(sign, _mm_slli_epi16(_mm_and_si128(w, _mm_set1_epi16(0x7f)), 7));
}

#ifdef __AVX512F__
struct Vector {
  static constexpr int width = 16;
  __m512 v;
  static Vector zero() { return {_mm512_setzero_ps()}; }
  static Vector set1(float f) { return {_mm512_set1_ps(f)}; }
  static Vector load(const float* f) { return {_mm512_loadu_ps(f)}; }
  void store(float* f) const { _mm512_storeu_ps(f, v); }
  static Vector fma(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static Vector mul(Vector a, Vector b) { return {_mm512_mul_ps(a.v, b.v)}; }
  static Vector add(Vector a, Vector b) { return {_mm512_add_ps(a.v, b.v)}; }
  static Vector scale(const uint8_t* s) {
    __m128i b = _mm_loadu_si128((const __m128i*)s);
    __m256i h = _mm256_set_m128i(e4m3_to_half_bits(_mm_srli_si128(b, 8)), e4m3_to_half_bits(b));
    return {_mm512_cvtph_ps(h)};
  }
  static Vector load(const Half* x) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x))}; }
  static Vector load(const Bfloat16* x) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  void store(Half* y) const {
    _mm256_storeu_si256((__m256i*)y, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  void store(Bfloat16* y) const {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i*)y, (__m256i)_mm512_cvtneps_pbh(v));
#else
    const __m512i f = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(f, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(f, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i*)y, _mm512_cvtepi32_epi16(r));
#endif
  }
};
struct Codes {
  __m512i v;
  static Codes load(const uint32_t* w) { return {_mm512_loadu_si512(w)}; }
  template <int j> Vector decode(const float* table) const {
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(v, shift_of(j)), _mm512_load_ps(table))};
  }
};
#else
struct Vector {
  static constexpr int width = 8;
  __m256 v;
  static Vector zero() { return {_mm256_setzero_ps()}; }
  static Vector set1(float f) { return {_mm256_set1_ps(f)}; }
  static Vector load(const float* f) { return {_mm256_loadu_ps(f)}; }
  void store(float* f) const { _mm256_storeu_ps(f, v); }
  static Vector fma(Vector a, Vector b, Vector c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static Vector mul(Vector a, Vector b) { return {_mm256_mul_ps(a.v, b.v)}; }
  static Vector add(Vector a, Vector b) { return {_mm256_add_ps(a.v, b.v)}; }
  static Vector scale(const uint8_t* s) {
    return {_mm256_cvtph_ps(e4m3_to_half_bits(_mm_loadl_epi64((const __m128i*)s)))};
  }
  static Vector load(const Half* x) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x))}; }
  static Vector load(const Bfloat16* x) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  void store(Half* y) const {
    _mm_storeu_si128((__m128i*)y, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  void store(Bfloat16* y) const {
    const __m256i f = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(f, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(f, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
    const __m128i bits = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
    _mm_storeu_si128((__m128i*)y, bits);
  }
};
struct Codes {
  __m256i v;
  static Codes load(const uint32_t* w) { return {_mm256_loadu_si256((const __m256i*)w)}; }
  template <int j> Vector decode(const float* table) const {
    // The look-up reads 3 bits, the magnitude; the sign is bit 3 of the code.
    __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_load_ps(table), _mm256_srli_epi32(v, shift_of(j)));
    __m256i sign = _mm256_and_si256(_mm256_slli_epi32(v, 28 - shift_of(j)), _mm256_set1_epi32(int(0x80000000u)));
    return {_mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign))};
  }
};
#endif

constexpr int kParts = kTile / Vector::width;  // vectors of a tile

// y = c * factor + bias of `Vectors` vectors of output rows from n0 on; c has `stride` numbers from row to row.
// Unless Whole, only the first `count` numbers of a row are written.
template <typename Y, int Vectors, bool Whole>
void finish_vectors(const Problem& p, int64_t row, int64_t rows, int64_t n0, int64_t count, const float* c,
                    int64_t stride) {
  constexpr int kWidth = Vectors * Vector::width;
  float some_bias[kWidth] = {};
  if (p.bias) std::memcpy(some_bias, p.bias + n0, count * sizeof(float));
  Vector factor[Vectors], bias[Vectors];
  for (int v = 0; v < Vectors; v++) {
    factor[v] = Vector::mul(Vector::load(p.factor + n0 + v * Vector::width), Vector::set1(kE4m3));
    bias[v] = Vector::load(some_bias + v * Vector::width);
  }
  Y* y = static_cast<Y*>(p.y) + row * p.n + n0;
  for (int64_t i = 0; i < rows; i++, y += p.n, c += stride) {
    Y part[kWidth];
    Y* to = Whole ? y : part;
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++)
      Vector::fma(Vector::load(c + v * Vector::width), factor[v], bias[v]).store(to + v * Vector::width);
    if (!Whole) std::memcpy(y, part, count * sizeof(Y));
  }
}

// Results of one or two tiles: c [rows, 16 * tiles] -> y[row.., tile * 16..].
template <typename Y>
void finish_as(const Problem& p, int64_t row, int64_t rows, int64_t tile, int64_t tiles, const float* c,
               int64_t stride) {
  const int64_t n0 = tile * kTile, left = p.n - n0;
  if (tiles == 2 && left >= 2 * kTile)
    return finish_vectors<Y, 2 * kParts, true>(p, row, rows, n0, 2 * kTile, c, stride);
  if (left >= kTile) finish_vectors<Y, kParts, true>(p, row, rows, n0, kTile, c, stride);
  else finish_vectors<Y, kParts, false>(p, row, rows, n0, left, c, stride);
  if (tiles == 2 && left > kTile) finish_as<Y>(p, row, rows, tile + 1, 1, c + kTile, stride);
}

inline void finish(const Problem& p, int64_t row, int64_t rows, int64_t tile, int64_t tiles, const float* c,
                   int64_t stride) {
  if (p.dtype == Dtype::f32) finish_as<float>(p, row, rows, tile, tiles, c, stride);
  else if (p.dtype == Dtype::bf16) finish_as<Bfloat16>(p, row, rows, tile, tiles, c, stride);
  else finish_as<Half>(p, row, rows, tile, tiles, c, stride);
}

}  // namespace
}  // namespace ISA
