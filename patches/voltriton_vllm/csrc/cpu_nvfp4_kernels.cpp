// y = x W^T + b with W in NVFP4, compiled once for each instruction set (ISA names the namespace).
//
// Few rows of x (decoding): weights are decoded in registers, 16 output rows side by side, so there is no
// horizontal sum: shift, look up, multiply-add. A group of 16 columns is summed before its scale is applied.
// Many rows (prefill): a panel of output rows is decoded into a buffer in the second-level cache, then
// multiplied as in any matrix product. Sums are float32. With AVX512-BF16 and bfloat16 activations the panel is
// bfloat16: e2m1 times E4M3 has at most 6 significant bits, so that is exact.
//
// E4M3 is decoded through half precision (its bits moved to half's places are the value times 2^-8); the
// factor 2^8 is taken into the row's factor.
#include "cpu_nvfp4.h"

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace ISA {
namespace {

constexpr int shift_of(int column) { return 16 * (column & 1) + 4 * (column >> 1); }  // in a word
constexpr int kTile = 16;        // output rows of a tile
constexpr float kE4m3 = 256.0f;  // see above
constexpr int64_t kFewRows = 12; // up to here weights are decoded in registers
alignas(64) const float kE2m1[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                     -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

inline float to_float(uint16_t v, Dtype dtype) {
  if (dtype == Dtype::f16) return _cvtsh_ss(v);
  uint32_t bits = uint32_t(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t from_float(float f, Dtype dtype) {
  if (dtype == Dtype::f16) return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (f != f) return 0x7fc0;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void widen(const Problem& p, int64_t first, int64_t rows, float* out) {
  const int64_t count = rows * p.k;
  const uint16_t* x = static_cast<const uint16_t*>(p.x) + first * p.k;
  if (p.dtype == Dtype::f16) {
    for (int64_t i = 0; i < count; i += 8)
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + i))));
  } else {
    for (int64_t i = 0; i < count; i += 8)
      _mm256_storeu_ps(out + i, _mm256_castsi256_ps(_mm256_slli_epi32(
                                    _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(x + i))), 16)));
  }
}

// values [16] of output rows tile*16.. for row `row` of x: factor, bias, rounding, store.
inline void finish(const Problem& p, int64_t row, int64_t tile, const float* values) {
  const int64_t n0 = tile * kTile;
  const int count = int(std::min<int64_t>(kTile, p.n - n0));
  if (count == kTile && p.dtype == Dtype::f32) {
    float* y = static_cast<float*>(p.y) + row * p.n + n0;
    for (int i = 0; i < kTile; i++) y[i] = values[i] * (p.factor[n0 + i] * kE4m3);
    if (p.bias)
      for (int i = 0; i < kTile; i++) y[i] += p.bias[n0 + i];
    return;
  }
  float out[kTile];
  for (int i = 0; i < count; i++) {
    out[i] = values[i] * (p.factor[n0 + i] * kE4m3);
    if (p.bias) out[i] += p.bias[n0 + i];
  }
  const int64_t at = row * p.n + n0;
  if (p.dtype == Dtype::f32) {
    std::memcpy(static_cast<float*>(p.y) + at, out, count * sizeof(float));
  } else {
    uint16_t* y = static_cast<uint16_t*>(p.y) + at;
    for (int i = 0; i < count; i++) y[i] = from_float(out[i], p.dtype);
  }
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
  static Vector scale(const uint8_t* s) {
    __m128i b = _mm_loadu_si128((const __m128i*)s);
    __m256i h = _mm256_set_m128i(e4m3_to_half_bits(_mm_srli_si128(b, 8)), e4m3_to_half_bits(b));
    return {_mm512_cvtph_ps(h)};
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
  static Vector scale(const uint8_t* s) {
    return {_mm256_cvtph_ps(e4m3_to_half_bits(_mm_loadl_epi64((const __m128i*)s)))};
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

template <int MB, int NV, int j>
inline void column(const Codes* codes, const float* x, int64_t k, Vector (&sum)[NV][MB]) {
  Vector w[NV];
  for (int n = 0; n < NV; n++) w[n] = codes[n].template decode<j>(kE2m1);
  for (int m = 0; m < MB; m++) {
    Vector xv = Vector::set1(x[m * k + j]);
    for (int n = 0; n < NV; n++) sum[n][m] = Vector::fma(w[n], xv, sum[n][m]);
  }
}

// MB rows of x, NV vectors of output rows that begin at vector `first` (tile first/kParts, part first%kParts).
template <int MB, int NV>
void few(const Problem& p, const float* x, int64_t row, int64_t first) {
  const int64_t groups = p.k / 16;
  Vector total[NV][MB];
  for (auto& t : total)
    for (auto& v : t) v = Vector::zero();
  const uint32_t* words[NV];
  const uint8_t* scale[NV];
  for (int n = 0; n < NV; n++) {
    const int64_t tile = (first + n) / kParts, part = (first + n) % kParts * Vector::width;
    words[n] = p.words + tile * (p.k / 8) * kTile + part;
    scale[n] = p.scale + tile * groups * kTile + part;
  }
  for (int64_t g = 0; g < groups; g++) {
    Vector sum[NV][MB];
    for (auto& t : sum)
      for (auto& v : t) v = Vector::zero();
    for (int half = 0; half < 2; half++) {
      Codes codes[NV];
      for (int n = 0; n < NV; n++) codes[n] = Codes::load(words[n] + (2 * g + half) * kTile);
      const float* xg = x + 16 * g + 8 * half;
      column<MB, NV, 0>(codes, xg, p.k, sum);
      column<MB, NV, 1>(codes, xg, p.k, sum);
      column<MB, NV, 2>(codes, xg, p.k, sum);
      column<MB, NV, 3>(codes, xg, p.k, sum);
      column<MB, NV, 4>(codes, xg, p.k, sum);
      column<MB, NV, 5>(codes, xg, p.k, sum);
      column<MB, NV, 6>(codes, xg, p.k, sum);
      column<MB, NV, 7>(codes, xg, p.k, sum);
    }
    for (int n = 0; n < NV; n++) {
      const Vector s = Vector::scale(scale[n] + g * kTile);
      for (int m = 0; m < MB; m++) total[n][m] = Vector::fma(sum[n][m], s, total[n][m]);
    }
  }
  float out[MB][NV * Vector::width];
  for (int n = 0; n < NV; n++)
    for (int m = 0; m < MB; m++) total[n][m].store(out[m] + n * Vector::width);
  for (int m = 0; m < MB; m++)
    for (int t = 0; t < NV / kParts; t++) finish(p, row + m, first / kParts + t, out[m] + t * kTile);
}

#ifdef __AVX512BF16__
// As `few`, with bfloat16 pairs: one look-up and one multiply-add for two columns. A code's fifth index bit
// belongs to its neighbour, so the table is repeated.
alignas(64) const uint16_t kE2m1Bf16[32] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80,
    0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0, 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
    0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

template <int MB, int NV>
void few(const Problem& p, const uint16_t* x, int64_t row, int64_t first) {
  const int64_t groups = p.k / 16;
  const __m512i table = _mm512_load_si512(kE2m1Bf16);
  __m512 total[NV][MB];
  for (auto& t : total)
    for (auto& v : t) v = _mm512_setzero_ps();
  const uint32_t* words = p.words + first * (p.k / 8) * kTile;
  const uint8_t* scale = p.scale + first * groups * kTile;
  for (int64_t g = 0; g < groups; g++) {
    __m512 sum[NV][MB];
    for (auto& t : sum)
      for (auto& v : t) v = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      __m512i codes[NV];
#pragma GCC unroll 8
      for (int n = 0; n < NV; n++)
        codes[n] = _mm512_loadu_si512(words + n * (p.k / 8) * kTile + (2 * g + half) * kTile);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        __m512bh w[NV];
#pragma GCC unroll 8
        for (int n = 0; n < NV; n++)
          w[n] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi32(codes[n], 4 * j), table);
#pragma GCC unroll 8
        for (int m = 0; m < MB; m++) {
          int pair;
          std::memcpy(&pair, x + m * p.k + 16 * g + 8 * half + 2 * j, 4);
          const __m512bh xv = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
          for (int n = 0; n < NV; n++) sum[n][m] = _mm512_dpbf16_ps(sum[n][m], w[n], xv);
        }
      }
    }
#pragma GCC unroll 8
    for (int n = 0; n < NV; n++) {
      const __m512 s = Vector::scale(scale + (n * groups + g) * kTile).v;
#pragma GCC unroll 8
      for (int m = 0; m < MB; m++) total[n][m] = _mm512_fmadd_ps(sum[n][m], s, total[n][m]);
    }
  }
  for (int n = 0; n < NV; n++)
    for (int m = 0; m < MB; m++) {
      alignas(64) float out[kTile];
      _mm512_store_ps(out, total[n][m]);
      finish(p, row + m, first + n, out);
    }
}
#endif

// All output tiles [begin, end) for MB rows of x; NT tiles at a time keep the multiply-adds independent.
template <int MB, int NT, typename X>
void few_tiles(const Problem& p, const X* x, int64_t row, int64_t begin, int64_t end) {
  int64_t t = begin;
  for (; t + NT <= end; t += NT) few<MB, NT * kParts>(p, x, row, t * kParts);
  for (; t < end; t++) few<MB, kParts>(p, x, row, t * kParts);
}

template <typename X>
void few_rows(const Problem& p, const X* x, int64_t begin, int64_t end) {
  constexpr bool wide = Vector::width == 16;
  constexpr int most = wide ? 8 : 2;
  int64_t row = 0;
  for (; p.m - row >= most; row += most) few_tiles<most, 1>(p, x + row * p.k, row, begin, end);
  if (wide) {
    if (p.m - row >= 4) { few_tiles<4, 2>(p, x + row * p.k, row, begin, end); row += 4; }
    if (p.m - row >= 2) { few_tiles<2, 4>(p, x + row * p.k, row, begin, end); row += 2; }
  }
  for (; row < p.m; row++) few_tiles<1, wide ? 8 : 2>(p, x + row * p.k, row, begin, end);
}

// ---- many rows -----------------------------------------------------------------------------------------

constexpr int64_t kColumns = 1024;                    // of a panel
constexpr int kPanelTiles = Vector::width == 16 ? 2 : 1;
constexpr int kPanel = kPanelTiles * kTile;           // output rows of a panel
constexpr int kPanelVectors = kPanel / Vector::width;  // 2
constexpr int kBlock = Vector::width == 16 ? 12 : 6;  // rows of x at a time: 24 (12) sums in registers

template <int j>
inline void panel_column(const Codes& codes, Vector scale, float* out) {
  Vector::mul(codes.template decode<j>(kE2m1), scale).store(out + j * kPanel);
}

// Weights times block scale (times 2^-8) of columns [k0, k0+kc) -> out [kc, kPanel] float32.
void decode_panel(const Problem& p, int64_t tile0, int64_t k0, int64_t kc, float* out) {
  const int64_t tiles = (p.n + kTile - 1) / kTile;
  for (int t = 0; t < kPanelTiles; t++) {
    const int64_t tile = std::min(tile0 + t, tiles - 1);
    for (int part = 0; part < kParts; part++) {
      const uint32_t* words = p.words + tile * (p.k / 8) * kTile + part * Vector::width;
      const uint8_t* scale = p.scale + tile * (p.k / 16) * kTile + part * Vector::width;
      float* to = out + t * kTile + part * Vector::width;
      for (int64_t k = 0; k < kc; k += 8) {
        const Vector s = Vector::scale(scale + (k0 + k) / 16 * kTile);
        const Codes codes = Codes::load(words + (k0 + k) / 8 * kTile);
        float* at = to + k * kPanel;
        panel_column<0>(codes, s, at); panel_column<1>(codes, s, at);
        panel_column<2>(codes, s, at); panel_column<3>(codes, s, at);
        panel_column<4>(codes, s, at); panel_column<5>(codes, s, at);
        panel_column<6>(codes, s, at); panel_column<7>(codes, s, at);
      }
    }
  }
}

// c [rows, kPanel] += x [rows, kc] panel [kc, kPanel]. Every loop over the sums is unrolled: one that is not
// keeps them all in memory.
template <int MB>
void block(const float* x, int64_t stride, const float* panel, int64_t kc, float* c) {
  Vector sum[MB][kPanelVectors];
#pragma GCC unroll 12
  for (int m = 0; m < MB; m++)
#pragma GCC unroll 2
    for (int n = 0; n < kPanelVectors; n++) sum[m][n] = Vector::load(c + m * kPanel + n * Vector::width);
  for (int64_t k = 0; k < kc; k++) {
    Vector w[kPanelVectors];
#pragma GCC unroll 2
    for (int n = 0; n < kPanelVectors; n++) w[n] = Vector::load(panel + k * kPanel + n * Vector::width);
#pragma GCC unroll 12
    for (int m = 0; m < MB; m++) {
      const Vector xv = Vector::set1(x[m * stride + k]);
#pragma GCC unroll 2
      for (int n = 0; n < kPanelVectors; n++) sum[m][n] = Vector::fma(w[n], xv, sum[m][n]);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < MB; m++)
#pragma GCC unroll 2
    for (int n = 0; n < kPanelVectors; n++) sum[m][n].store(c + m * kPanel + n * Vector::width);
}

#ifdef __AVX512BF16__
// Pairs of columns, bfloat16: out [kc/2, kPanel] of (even column in the low half).
void decode_panel(const Problem& p, int64_t tile0, int64_t k0, int64_t kc, uint32_t* out) {
  const int64_t tiles = (p.n + kTile - 1) / kTile;
  const __m512 table = _mm512_load_ps(kE2m1);
  const __m512i high = _mm512_set1_epi32(int(0xffff0000u));
  for (int t = 0; t < kPanelTiles; t++) {
    const int64_t tile = std::min(tile0 + t, tiles - 1);
    const uint32_t* words = p.words + tile * (p.k / 8) * kTile;
    const uint8_t* scale = p.scale + tile * (p.k / 16) * kTile;
    for (int64_t k = 0; k < kc; k += 8) {
      const __m512 s = Vector::scale(scale + (k0 + k) / 16 * kTile).v;
      __m512i codes = _mm512_loadu_si512(words + (k0 + k) / 8 * kTile);
      for (int j = 0; j < 8; j += 2) {
        const __m512 a = _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), s);
        const __m512 b = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 16), table), s);
        const __m512i pair = _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16),
                                             _mm512_and_si512(_mm512_castps_si512(b), high));
        _mm512_storeu_si512(out + (k + j) / 2 * kPanel + t * kTile, pair);
        codes = _mm512_srli_epi32(codes, 4);
      }
    }
  }
}

template <int MB>
void block(const uint16_t* x, int64_t stride, const uint32_t* panel, int64_t kc, float* c) {
  __m512 sum[MB][2];
  for (int m = 0; m < MB; m++)
    for (int n = 0; n < 2; n++) sum[m][n] = _mm512_loadu_ps(c + m * kPanel + n * 16);
  for (int64_t k = 0; k < kc; k += 2) {
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel + k / 2 * kPanel);
    const __m512bh w1 = (__m512bh)_mm512_loadu_si512(panel + k / 2 * kPanel + 16);
#pragma GCC unroll 12
    for (int m = 0; m < MB; m++) {
      int pair;
      std::memcpy(&pair, x + m * stride + k, 4);
      const __m512bh xv = (__m512bh)_mm512_set1_epi32(pair);
      sum[m][0] = _mm512_dpbf16_ps(sum[m][0], w0, xv);
      sum[m][1] = _mm512_dpbf16_ps(sum[m][1], w1, xv);
    }
  }
  for (int m = 0; m < MB; m++)
    for (int n = 0; n < 2; n++) _mm512_storeu_ps(c + m * kPanel + n * 16, sum[m][n]);
}
#endif

template <typename X, typename W>
void blocks(const X* x, int64_t stride, const W* panel, int64_t kc, int64_t rows, float* c) {
  int64_t m = 0;
  for (; m + kBlock <= rows; m += kBlock) block<kBlock>(x + m * stride, stride, panel, kc, c + m * kPanel);
  for (; m + 4 <= rows; m += 4) block<4>(x + m * stride, stride, panel, kc, c + m * kPanel);
  for (; m < rows; m++) block<1>(x + m * stride, stride, panel, kc, c + m * kPanel);
}

// One panel of output rows for rows [row, row+rows) of x (given from there on).
template <typename X, typename W>
void panel_rows(const Problem& p, const X* x, int64_t row, int64_t rows, int64_t tile0, W* panel, float* c) {
  std::fill(c, c + rows * kPanel, 0.f);
  for (int64_t k0 = 0; k0 < p.k; k0 += kColumns) {
    const int64_t kc = std::min(kColumns, p.k - k0);
    decode_panel(p, tile0, k0, kc, panel);
    blocks(x + k0, p.k, panel, kc, rows, c);
  }
  const int64_t tiles = (p.n + kTile - 1) / kTile;
  for (int64_t m = 0; m < rows; m++)
    for (int t = 0; t < kPanelTiles && tile0 + t < tiles; t++)
      finish(p, row + m, tile0 + t, c + m * kPanel + t * kTile);
}

template <typename X, typename W>
void many_rows(const Problem& p, const X* x) {
  const int64_t panels = ((p.n + kTile - 1) / kTile + kPanelTiles - 1) / kPanelTiles;
  const int64_t threads = omp_get_max_threads();
  // Enough pieces for all threads also where there are few output rows.
  const int64_t cuts = std::max<int64_t>(1, std::min(p.m / kBlock, (2 * threads + panels - 1) / panels));
  const int64_t rows = (p.m + cuts - 1) / cuts;
#pragma omp parallel
  {
    std::vector<W> panel(kColumns * kPanel);
    std::vector<float> c(rows * kPanel);
#pragma omp for schedule(static)
    for (int64_t piece = 0; piece < panels * cuts; piece++) {
      const int64_t row = piece % cuts * rows, count = std::min(rows, p.m - row);
      if (count > 0)
        panel_rows(p, x + row * p.k, row, count, piece / cuts * kPanelTiles, panel.data(), c.data());
    }
  }
}

template <typename X>
void few_all(const Problem& p, const X* x) {
  const int64_t tiles = (p.n + kTile - 1) / kTile;
  const int64_t piece = 8;  // tiles; the largest number that is worked on side by side
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tiles; t += piece) few_rows(p, x, t, std::min(tiles, t + piece));
}

}  // namespace

void linear(const Problem& p) {
#ifdef __AVX512BF16__
  if (p.dtype == Dtype::bf16) {
    const uint16_t* half = static_cast<const uint16_t*>(p.x);
    if (p.m > kFewRows) many_rows<uint16_t, uint32_t>(p, half);
    else few_all(p, half);
    return;
  }
#endif
  std::vector<float> wide;
  const float* x = static_cast<const float*>(p.x);
  if (p.dtype != Dtype::f32) {
    wide.resize(p.m * p.k);
    widen(p, 0, p.m, wide.data());
    x = wide.data();
  }
  if (p.m > kFewRows) {
    many_rows<float, float>(p, x);
    return;
  }
  few_all(p, x);
}

}  // namespace ISA
