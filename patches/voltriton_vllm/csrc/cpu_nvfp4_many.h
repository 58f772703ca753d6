// Many rows of x (prefill): a panel of output rows is decoded into a buffer in the second-level cache, then
// multiplied as in any matrix product. Sums are float32. With AVX512-BF16 and bfloat16 activations the panel is
// bfloat16: e2m1 times E4M3 has at most 6 significant bits, so that is exact.
#pragma once
#include "cpu_nvfp4_vector.h"

#include <omp.h>

namespace ISA {
namespace {

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
  for (int t = 0; t < kPanelTiles; t++) {
    const int64_t tile = std::min(tile0 + t, tiles - 1);
    const uint32_t* words = p.words + tile * (p.k / 8) * kTile;
    const uint8_t* scale = p.scale + tile * (p.k / 16) * kTile;
    for (int64_t k = 0; k < kc; k += 8) {
      const __m512 s = Vector::scale(scale + (k0 + k) / 16 * kTile).v;
      __m512i codes = _mm512_loadu_si512(words + (k0 + k) / 8 * kTile);
      for (int j = 0; j < 8; j += 2) {
        _mm512_storeu_si512(out + (k + j) / 2 * kPanel + t * kTile, bf16_pairs(codes, s));
        codes = _mm512_srli_epi32(codes, 4);
      }
    }
  }
}

template <int MB>
void block(const uint16_t* x, int64_t stride, const uint32_t* panel, int64_t kc, float* c) {
  __m512 sum[MB][2];
#pragma GCC unroll 12
  for (int m = 0; m < MB; m++)
#pragma GCC unroll 2
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
#pragma GCC unroll 12
  for (int m = 0; m < MB; m++)
#pragma GCC unroll 2
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
  finish(p, row, rows, tile0, kPanelTiles, c, kPanel);
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
    Scratch<W> panel(kColumns * kPanel);
    Scratch<float> c(rows * kPanel);
#pragma omp for schedule(static)
    for (int64_t piece = 0; piece < panels * cuts; piece++) {
      const int64_t row = piece % cuts * rows, count = std::min(rows, p.m - row);
      if (count > 0)
        panel_rows(p, x + row * p.k, row, count, piece / cuts * kPanelTiles, panel.at, c.at);
    }
  }
}

}  // namespace
}  // namespace ISA
