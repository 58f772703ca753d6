// Many rows of x (prefill): a matrix product in blocks, whose weights are decoded a panel (32 output rows; 16 with
// AVX2) at a time into the second-level cache. x is put into the order first in which it is read, or a row length
// that is a multiple of 4 KiB would bring all rows of a block to the same places of the first-level cache. Sums are
// float32 in registers; where a panel is not cut they go from there to y.
//
// A step is four bytes of a row of x: a number of float32, or with AVX512-BF16 and bfloat16 activations a pair of
// columns. There the panel is bfloat16 as well: e2m1 times E4M3 has at most 6 significant bits, so that is exact.
#pragma once
#ifdef __AVX512BF16__
#include "cpu_nvfp4_pairs.h"
#endif
#include "cpu_nvfp4_vector.h"

#include <omp.h>

namespace ISA {
namespace {

// Up to here decoding in registers is as fast or faster, measured.
inline int64_t few_up_to([[maybe_unused]] Dtype dtype) {
#ifdef __AVX512BF16__
  if (dtype == Dtype::bf16) return 24;
#endif
  return Vector::width == 16 ? 16 : 4;
}

constexpr int64_t kSteps = 2048;         // of a panel at most: 256 KiB of 32 output rows
constexpr int64_t kRowsBytes = 8 << 20;  // of x in order at a time: a share of the third-level cache
constexpr int64_t kRowsAtOnce = 512;     // to decode a panel for so many is 1 % of the work
constexpr int kLine = 16;                // steps of a cache line
constexpr int kPanelTiles = Vector::width == 16 ? 2 : 1;
constexpr int kPanel = kPanelTiles * kTile;            // output rows of a panel
constexpr int kPanelVectors = kPanel / Vector::width;  // 2
constexpr int kBlock = Vector::width == 16 ? 12 : 6;   // rows of x at a time at most: 24 (12) sums in registers

struct Rows;
struct Weights;
struct Sums;

// The kinds of steps. `X` is the type of x and y, `Placed` what x is in the steps.
template <typename X_>
struct Singles {
  using X = X_;
  using Placed = float;
  static constexpr int columns = 1;

  static Vector multiply_add(Vector w, const uint32_t* step, Vector sum) {
    float x;
    std::memcpy(&x, step, sizeof x);
    return Vector::fma(w, Vector::set1(x), sum);
  }

  static void place(const X* x, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += Vector::width) Vector::load(x + i).store(out + i);
  }

  // A group's codes of a vector of output rows -> 16 steps.
  static void decode(const uint32_t* words, const uint8_t* scales, float* out) {
    const Vector scale = Vector::scale(scales);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++, words += kTile, out += 8 * kPanel) {
      const Codes codes = Codes::load(words);
      column<0>(codes, scale, out); column<1>(codes, scale, out);
      column<2>(codes, scale, out); column<3>(codes, scale, out);
      column<4>(codes, scale, out); column<5>(codes, scale, out);
      column<6>(codes, scale, out); column<7>(codes, scale, out);
    }
  }

  template <int j>
  static void column(const Codes& codes, Vector scale, float* out) {
    Vector::mul(codes.template decode<j>(kE2m1), scale).store(out + j * kPanel);
  }
};

#ifdef __AVX512BF16__
struct Pairs {  // the even column in the low half
  using X = Bfloat16;
  using Placed = Bfloat16;
  static constexpr int columns = 2;

  static Vector multiply_add(Vector w, const uint32_t* step, Vector sum) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)w.v, (__m512bh)_mm512_set1_epi32(int(*step)))};
  }

  static void place(const Bfloat16* x, int64_t count, Bfloat16* out) { std::memcpy(out, x, count * sizeof *x); }

  static void decode(const uint32_t* words, const uint8_t* scale, float* out) {
    const PairDecoder decoder(scale);
    decoder.word(words, out, kPanel);
    decoder.word(words + kTile, out + 4 * kPanel, kPanel);
  }
};
#endif

// Weights times block scale (times 2^-8) of columns [k0, k0+kc) -> out [steps, kPanel].
template <typename Kind>
void decode_panel(const Problem& p, int64_t panel, int64_t k0, int64_t kc, float* out) {
  const int64_t last = up(p.n, kTile) - 1;
  for (int v = 0; v < kPanelVectors; v++) {
    const int64_t tile = std::min(panel * kPanelTiles + v / kParts, last), part = v % kParts * Vector::width;
    const uint32_t* words = p.words + (tile * p.k + k0) / 8 * kTile + part;
    const uint8_t* scale = p.scale + (tile * p.k + k0) / 16 * kTile + part;
    float* to = out + v * Vector::width;
    for (int64_t k = 0; k < kc; k += 16, words += 2 * kTile, scale += kTile, to += 16 / Kind::columns * kPanel)
      Kind::decode(words, scale, to);
  }
}

// A block of rows times (some columns of) a panel.
struct Turn {
  const uint32_t* x;     // lines [steps/16, rows] of 16 steps
  const float* weights;  // [steps, kPanel]
  int64_t steps;
  float* sums;           // [rows, kPanel]
  bool add;              // to what is in the sums
  bool whole;            // these are all columns: the result goes to y
  const Problem& p;
  int64_t row, n0;       // of y
};

// y = sums * factor + bias, for a panel that lies in y wholly.
template <typename Y, int RowCount>
inline void write(const Turn& t, const Vector (&sum)[RowCount][kPanelVectors]) {
  Y* y = static_cast<Y*>(t.p.y) + t.row * t.p.n + t.n0;
  Vector factor[kPanelVectors], bias[kPanelVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kPanelVectors; v++) {
    const int64_t n = t.n0 + v * Vector::width;
    factor[v] = Vector::mul(Vector::load(t.p.factor + n), Vector::set1(kE4m3));
    bias[v] = t.p.bias ? Vector::load(t.p.bias + n) : Vector::zero();
  }
#pragma GCC unroll 12
  for (int m = 0; m < RowCount; m++)
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; v++)
      Vector::fma(sum[m][v], factor[v], bias[v]).store(y + m * t.p.n + v * Vector::width);
}

// Every loop over the sums is unrolled: one that is not keeps them all in memory.
template <typename Kind, int RowCount>
void multiply(const Turn& t) {
  Vector sum[RowCount][kPanelVectors];
#pragma GCC unroll 12
  for (int m = 0; m < RowCount; m++)
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; v++)
      sum[m][v] = t.add ? Vector::load(t.sums + m * kPanel + v * Vector::width) : Vector::zero();
  const uint32_t* x = t.x;
  const float* weights = t.weights;
  for (int64_t left = t.steps; left > 0; left -= kLine, x += (RowCount - 1) * kLine) {
    const int64_t count = std::min<int64_t>(left, kLine);
    for (int64_t i = 0; i < count; i++, x++, weights += kPanel) {
      Vector w[kPanelVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; v++) w[v] = Vector::load(weights + v * Vector::width);
#pragma GCC unroll 12
      for (int m = 0; m < RowCount; m++)
#pragma GCC unroll 2
        for (int v = 0; v < kPanelVectors; v++) sum[m][v] = Kind::multiply_add(w[v], x + m * kLine, sum[m][v]);
    }
  }
  if (t.whole) return write<typename Kind::X>(t, sum);
#pragma GCC unroll 12
  for (int m = 0; m < RowCount; m++)
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; v++) sum[m][v].store(t.sums + m * kPanel + v * Vector::width);
}

template <typename Kind, int RowCount = kBlock>
void multiply(int64_t rows, const Turn& turn) {
  if constexpr (RowCount > 1)
    if (rows < RowCount) return multiply<Kind, RowCount - 1>(rows, turn);
  multiply<Kind, RowCount>(turn);
}

// Rows [row0, row0 + rows) of x.
template <typename Kind>
struct Part {
  using X = typename Kind::X;
  using Placed = typename Kind::Placed;
  static constexpr int64_t kWide = kLine * Kind::columns;  // columns of a line

  const Problem& p;
  uint32_t* const x;
  const int64_t row0, rows;
  const int64_t panels = up(p.n, kPanel), blocks = up(rows, kBlock), lines = up(p.k, kWide);
  const int64_t cuts = up(lines * kLine, kSteps), deep = up(lines, cuts);  // lines of a cut

  int64_t first(int64_t block) const { return rows * block / blocks; }  // blocks of nearly the same size

  void place(int64_t block) const {
    const int64_t begin = first(block), count = first(block + 1) - begin;
    for (int64_t m = 0; m < count; m++) {
      const X* from = static_cast<const X*>(p.x) + (row0 + begin + m) * p.k;
      Placed* to = reinterpret_cast<Placed*>(x + (begin * lines + m) * kLine);
      int64_t k = 0;
      for (; k + kWide <= p.k; k += kWide, to += count * kWide) Kind::place(from + k, kWide, to);
      if (k < p.k) Kind::place(from + k, p.k - k, to);
    }
  }

  // Blocks [begin, end) times a panel.
  void multiply_panel(int64_t panel, int64_t begin, int64_t end) const {
    float* const weights = room<Weights, float>(deep * kLine * kPanel);
    float* const sums = room<Sums, float>((first(end) - first(begin)) * kPanel);
    for (int64_t cut = 0; cut < cuts; cut++) {
      const int64_t k0 = cut * deep * kWide, kc = std::min(deep * kWide, p.k - k0);
      decode_panel<Kind>(p, panel, k0, kc, weights);
      for (int64_t block = begin; block < end; block++)
        multiply_block(block, panel, cut, weights, kc / Kind::columns, sums + (first(block) - first(begin)) * kPanel);
    }
  }

 private:
  void multiply_block(int64_t block, int64_t panel, int64_t cut, const float* weights, int64_t steps,
                      float* sums) const {
    const int64_t begin = first(block), count = first(block + 1) - begin, n0 = panel * kPanel;
    const bool last = cut == cuts - 1, whole = last && n0 + kPanel <= p.n;
    if (last) fetch(row0 + begin, count, n0);
    multiply<Kind>(count, Turn{x + (begin * lines + cut * deep * count) * kLine, weights, steps, sums, cut > 0, whole,
                               p, row0 + begin, n0});
    if (last && !whole) finish(p, row0 + begin, count, panel * kPanelTiles, kPanelTiles, sums, kPanel);
  }

  // The lines of y, whose rows are far apart, come into the cache before they are written.
  void fetch(int64_t row, int64_t count, int64_t n0) const {
    const X* y = static_cast<const X*>(p.y) + row * p.n + n0;
    for (; count > 0; count--, y += p.n) {
      __builtin_prefetch(y, 1);
      if (kPanel * sizeof(X) > 64) __builtin_prefetch(reinterpret_cast<const char*>(y) + 64, 1);
    }
  }
};

template <typename Kind>
void many_as(const Problem& p) {
  const int64_t row_steps = up(p.k, Part<Kind>::kWide) * kLine;
  const int64_t at_once = std::max<int64_t>(kRowsBytes / (row_steps * sizeof(uint32_t)), 8 * kBlock);
  const int64_t parts = up(p.m, std::min(at_once, kRowsAtOnce));
  uint32_t* const x = room<Rows, uint32_t>(up(p.m, parts) * row_steps);
  for (int64_t i = 0; i < parts; i++) {
    const int64_t row0 = p.m * i / parts;
    const Part<Kind> part{p, x, row0, p.m * (i + 1) / parts - row0};
    const int64_t blocks = part.blocks;
#pragma omp parallel
    {
#pragma omp for schedule(static)
      for (int64_t block = 0; block < blocks; block++) part.place(block);
      // Enough pieces for all threads also where there are few panels.
      const int64_t cuts = std::min(blocks, up(2 * omp_get_num_threads(), part.panels));
#pragma omp for schedule(static)
      for (int64_t piece = 0; piece < part.panels * cuts; piece++) {
        const int64_t cut = piece % cuts;
        part.multiply_panel(piece / cuts, blocks * cut / cuts, blocks * (cut + 1) / cuts);
      }
    }
  }
}

void many(const Problem& p) {
  if (p.dtype == Dtype::f32) many_as<Singles<float>>(p);
  else if (p.dtype == Dtype::f16) many_as<Singles<Half>>(p);
#ifdef __AVX512BF16__
  else many_as<Pairs>(p);
#else
  else many_as<Singles<Bfloat16>>(p);
#endif
}

}  // namespace
}  // namespace ISA
