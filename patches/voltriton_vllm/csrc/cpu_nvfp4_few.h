// Few rows of x (decoding): weights are decoded in registers, 16 output rows side by side, so there is no
// horizontal sum: shift, look up, multiply-add. A group of 16 columns is summed before its scale is applied.
#pragma once
#include "cpu_nvfp4_vector.h"

namespace ISA {
namespace {

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
  for (int t = 0; t < NV / kParts; t++)
    finish(p, row, MB, first / kParts + t, 1, out[0] + t * kTile, NV * Vector::width);
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
  for (int n = 0; n < NV; n++) {
    alignas(64) float out[MB][kTile];
    for (int m = 0; m < MB; m++) _mm512_store_ps(out[m], total[n][m]);
    finish(p, row, MB, first + n, 1, out[0], kTile);
  }
}
#endif

constexpr int kMostWide = 8, kMost = Vector::width == 16 ? kMostWide : 2;  // rows at a time at most

// Tiles at a time: enough independent sums, as many as there are registers for; measured.
template <typename X, int MB>
constexpr int few_tiles() {
  constexpr bool pairs = sizeof(X) == 2;
  if (Vector::width == 8) return MB == 1 ? 2 : 1;
  constexpr int tiles[kMostWide] = {8, 4, 3, 2, pairs ? 2 : 1, pairs ? 2 : 1, 1, 1};
  return tiles[MB - 1];
}

// All output tiles [begin, end) for `rows` rows of x, MB at most.
template <typename X, int MB = kMost>
void few_block(const Problem& p, int64_t rows, const X* x, int64_t row, int64_t begin, int64_t end) {
  if constexpr (MB > 1)
    if (rows < MB) return few_block<X, MB - 1>(p, rows, x, row, begin, end);
  constexpr int kTiles = few_tiles<X, MB>();
  int64_t t = begin;
  for (; t + kTiles <= end; t += kTiles) few<MB, kTiles * kParts>(p, x, row, t * kParts);
  for (; t < end; t++) few<MB, kParts>(p, x, row, t * kParts);
}

template <typename X>
void few_rows(const Problem& p, const X* x, int64_t begin, int64_t end) {
  const int64_t blocks = up(p.m, kMost);  // of nearly the same size
  for (int64_t i = 0; i < blocks; i++) {
    const int64_t row = p.m * i / blocks, rows = p.m * (i + 1) / blocks - row;
    few_block(p, rows, x + row * p.k, row, begin, end);
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
}  // namespace ISA
