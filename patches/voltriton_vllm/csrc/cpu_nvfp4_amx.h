// Some or many rows of x on CPUs with AMX: products of tiles in bfloat16, sums in float32.
//
// A tile register holds 16 rows of 64 bytes. One multiplication adds to a tile of 16 x 16 sums the products of
// 16 rows of x and 16 output rows over 32 columns. Two by two of them at a time, so that each tile that is loaded
// is used twice. Weights are decoded a panel (32 output rows, up to kAmxColumns) at a time, in the tiles' order,
// into one of two buffers in the cache, between the multiplications with the panel before: those leave the vector
// units idle. x is put into the tiles' order first, filled up with zeros.
//
// What bounds it is memory, not the multiplications: writing y, and tiles that come from the second-level cache.
//
// The weights, without their global scale, are exact in bfloat16. float16 activations are the exact sum of two
// bfloat16 numbers, float32 activations of three; each is multiplied, as three columns of x would be.
#pragma once
#include "cpu_nvfp4_vector.h"

#include <omp.h>

namespace ISA {
namespace {

// Up to here decoding in registers is faster, measured; float16 and float32 are two and three parts.
inline int64_t few_up_to(Dtype dtype) { return dtype == Dtype::bf16 ? 2 : 4; }
constexpr int64_t kAmxColumns = 2048;   // of a panel at most: two of them take an eighth of a second-level cache
constexpr int64_t kAmxBytes = 1 << 20;  // of x in the tiles' order at a time: half of a second-level cache
constexpr int kStep = 32;               // columns of a tile of bfloat16
constexpr int kRowTile = 16;            // rows of x in a tile
constexpr int kBlockRows = 2 * kRowTile;
constexpr int kAmxPanel = 2 * kTile;    // output rows
constexpr int kTileWords = 256;         // a tile is 1 KiB

// All tiles have 16 rows of 64 bytes. Static, as the compiler does not know how much of it is read.
struct TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
alignas(64) const TileShapes kTileShapes;

// The tile registers of a thread while this lives. Others find none in use afterwards.
struct TileRegisters {
  TileRegisters() { _tile_loadconfig(&kTileShapes); }
  ~TileRegisters() { _tile_release(); }
};

struct Rows;
struct Weights;
struct Sums;

// x - bf16, where that is finite; infinities and NaN are in the first part alone.
inline __m512 residue(__m512 x, __m256i bf16) {
  const __m512 f = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
  const __mmask16 finite =
      _mm512_cmp_ps_mask(_mm512_abs_ps(f), _mm512_set1_ps(__builtin_inff()), _CMP_LT_OQ);
  return _mm512_maskz_sub_ps(finite, x, f);
}

// 32 (16, filled up) columns of a row of x -> their place in the tile of each part.
template <typename X>
inline void place(const X* x, bool whole, int parts, uint16_t* out) {
  Vector a = Vector::load(x), b = whole ? Vector::load(x + 16) : Vector::zero();
  for (int part = 0; part < parts; part++) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v);
    _mm512_storeu_si512(out + part * 2 * kTileWords, both);
    a.v = residue(a.v, _mm512_castsi512_si256(both));
    b.v = residue(b.v, _mm512_extracti64x4_epi64(both, 1));
  }
}

inline void place(const Bfloat16* x, bool whole, int, uint16_t* out) {
  _mm512_storeu_si512(out, _mm512_maskz_loadu_epi16(whole ? ~0u : 0xffffu, x));
}

// Rows [row, row+16) of x, zeros beyond p.m -> tiles [K/32, parts].
template <typename X>
void place_rows(const Problem& p, int64_t row, int parts, uint16_t* out) {
  const X* x = static_cast<const X*>(p.x);
  const int64_t tiles = up(p.k, kStep) * parts;
  for (int i = 0; i < kRowTile; i++) {
    uint16_t* to = out + i * kStep;
    if (row + i >= p.m) {
      for (int64_t t = 0; t < tiles; t++) _mm512_storeu_si512(to + t * 2 * kTileWords, _mm512_setzero_si512());
      continue;
    }
    for (int64_t k = 0; k < p.k; k += kStep)
      place(x + (row + i) * p.k + k, k + kStep <= p.k, parts, to + k / kStep * parts * 2 * kTileWords);
  }
}

// Weights (times scale) of two neighbouring columns of 16 rows as pairs of bfloat16, the even column in the low
// half. Exact, as in cpu_nvfp4_pairs.h, whose way was not tried on a CPU with AMX; the low half of a product is zero.
inline __m512i bf16_pairs(__m512i codes, __m512 scale) {
  const __m512 table = _mm512_load_ps(kE2m1);
  const __m512 even = _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), scale);
  const __m512 odd = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 16), table), scale);
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
}

// One panel's columns [k0, k0+kc) to decode, a group of 16 columns of a tile at a time -> tiles [kc/32, 2].
struct Decoder {
  const uint32_t* words[2] = {};
  const uint8_t* scale[2] = {};
  uint32_t* out = nullptr;
  int64_t next = 0, end = 0;

  Decoder() = default;
  Decoder(const Problem& p, int64_t panel, int64_t k0, int64_t kc, uint32_t* out) : out(out), end(kc / 16 * 2) {
    const int64_t last = up(p.n, kTile) - 1;
    for (int t = 0; t < 2; t++) {
      const int64_t tile = std::min(2 * panel + t, last);
      words[t] = p.words + (tile * p.k + k0) / 8 * kTile;
      scale[t] = p.scale + (tile * p.k + k0) / 16 * kTile;
    }
  }

  void some(int64_t groups) {
    for (const int64_t stop = std::min(end, next + groups); next < stop; next++) {
      const int64_t t = next & 1, group = next >> 1;
      const __m512 s = Vector::scale(scale[t] + group * kTile).v;
      uint32_t* to = out + ((group >> 1) * 2 + t) * kTileWords + (group & 1) * (kTileWords / 2);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const __m512i codes = _mm512_loadu_si512(words[t] + (2 * group + half) * kTile);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++, to += kTile)
          _mm512_storeu_si512(to, bf16_pairs(_mm512_srli_epi32(codes, 4 * j), s));
      }
    }
  }
  void rest() { some(end); }
};

// c [16 * RowTiles, 32] = or += x W^T over `steps` tiles of columns; a: tiles of x, those of the second 16 rows
// `second` words behind. `between` is called before each step: work that needs no tiles.
template <int RowTiles, int Parts, typename Between>
void multiply(const uint32_t* a, int64_t second, const uint32_t* b, int64_t steps, bool add, float* c,
              Between between) {
  constexpr int kStride = kAmxPanel * sizeof(float);
  if (add) {
    _tile_loadd(0, c, kStride);
    _tile_loadd(1, c + kTile, kStride);
    if (RowTiles == 2) {
      _tile_loadd(2, c + kRowTile * kAmxPanel, kStride);
      _tile_loadd(3, c + kRowTile * kAmxPanel + kTile, kStride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; s++, b += 2 * kTileWords) {
    between();
    asm volatile("" ::: "memory");  // the compiler does not know that loading a tile reads memory
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + kTileWords, 64);
#pragma GCC unroll 3
    for (int part = 0; part < Parts; part++, a += kTileWords) {
      _tile_loadd(4, a, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (RowTiles == 2) {
        _tile_loadd(5, a + second, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  _tile_stored(0, c, kStride);
  _tile_stored(1, c + kTile, kStride);
  if (RowTiles == 2) {
    _tile_stored(2, c + kRowTile * kAmxPanel, kStride);
    _tile_stored(3, c + kRowTile * kAmxPanel + kTile, kStride);
  }
}

// Rows [row0, row0 + rows) of x, in the tiles' order at `x`, times panels: the share of one thread.
template <typename Y, int Parts>
struct AmxShare {
  const Problem& p;
  const uint32_t* x;
  const int64_t row0, rows;
  const int64_t panels = up(p.n, kAmxPanel), steps = up(p.k, kStep);
  const int64_t cuts = up(p.k, kAmxColumns), columns = up(up(p.k, cuts), kStep) * kStep;

  // A piece is a panel and a range of blocks of rows; panels change first.
  void work(int64_t begin, int64_t end, int64_t blocks_of_piece) const {
    // Columns that fill up a tile are not decoded: what is there, earlier weights or zeros, is finite, as it must be
    // for its products with zeros to be zero.
    uint32_t* const weights = room<Weights, uint32_t>(2 * columns * kAmxPanel / 2);
    float* const sums = room<Sums, float>((cuts == 1 ? 1 : blocks_of_piece) * kBlockRows * kAmxPanel);
    const int64_t turns = (end - begin) * cuts;
    if (turns > 0) decoder(begin, 0, weights).rest();
    for (int64_t turn = 0; turn < turns; turn++) {
      const int64_t piece = begin + turn / cuts, first = piece / panels * blocks_of_piece;
      const int64_t last = std::min(first + blocks_of_piece, up(rows, kBlockRows)), cut = turn % cuts;
      const uint32_t* b = weights + (turn & 1) * columns * kAmxPanel / 2;
      Decoder next;
      if (turn + 1 < turns) {
        const int64_t then = turn + 1;
        next = decoder(begin + then / cuts, then % cuts, weights + (then & 1) * columns * kAmxPanel / 2);
      }
      for (int64_t block = first; block < last; block++) {
        float* c = sums + (cuts == 1 ? 0 : block - first) * kBlockRows * kAmxPanel;
        multiply_block(block, piece % panels, cut, b, c, next, up(4, last - first));
        if (cut == cuts - 1) finish_block(block, piece % panels, c);
      }
      next.rest();
    }
  }

 private:
  Decoder decoder(int64_t piece, int64_t cut, uint32_t* out) const {
    return Decoder(p, piece % panels, cut * columns, std::min(columns, p.k - cut * columns), out);
  }

  void multiply_block(int64_t block, int64_t panel, int64_t cut, const uint32_t* b, float* c, Decoder& next,
                      int64_t groups) const {
    const int64_t second = steps * Parts * kTileWords, first_step = cut * columns / kStep;
    const int64_t count = std::min(columns / kStep, steps - first_step), left = rows - block * kBlockRows;
    const uint32_t* a = x + block * 2 * second + first_step * Parts * kTileWords;
    const Y* y = static_cast<const Y*>(p.y) + (row0 + block * kBlockRows) * p.n + panel * kAmxPanel;
    int64_t to_fetch = cut == cuts - 1 ? std::min<int64_t>(kBlockRows, left) : 0;
    const auto between = [&] {
      next.some(groups);
      // The lines of y, whose rows are far apart, come into the cache before they are written.
      for (int64_t i = up(kBlockRows, count); i > 0 && to_fetch > 0; i--, to_fetch--, y += p.n)
        _m_prefetchw(const_cast<Y*>(y));
    };
    if (left > kRowTile) multiply<2, Parts>(a, second, b, count, cut > 0, c, between);
    else multiply<1, Parts>(a, second, b, count, cut > 0, c, between);
  }

  void finish_block(int64_t block, int64_t panel, const float* c) const {
    const int64_t row = block * kBlockRows;
    finish_as<Y>(p, row0 + row, std::min<int64_t>(kBlockRows, rows - row), 2 * panel, 2, c, kAmxPanel);
  }
};

template <typename X, int Parts>
void amx_rows(const Problem& p) {
  const int64_t bytes_of_row = up(p.k, kStep) * kStep * Parts * sizeof(uint16_t);
  const int64_t at_once = std::clamp<int64_t>(kAmxBytes / bytes_of_row / kBlockRows, 4, 32) * kBlockRows;
  const int64_t numbers_of_row = bytes_of_row / sizeof(uint16_t);
  uint16_t* const x = room<Rows, uint16_t>(up(std::min(at_once, p.m), kRowTile) * kRowTile * numbers_of_row);
  for (int64_t row0 = 0; row0 < p.m; row0 += at_once) {
    const int64_t rows = std::min(at_once, p.m - row0);
#pragma omp parallel
    {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; r += kRowTile)
        place_rows<X>(p, row0 + r, Parts, x + r * numbers_of_row);
      const AmxShare<X, Parts> share{p, reinterpret_cast<const uint32_t*>(x), row0, rows};
      // Enough pieces for all threads also where there are few panels.
      const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
      const int64_t blocks = up(rows, kBlockRows);
      const int64_t blocks_of_piece = up(blocks, std::min(blocks, up(2 * threads, share.panels)));
      const int64_t pieces = share.panels * up(blocks, blocks_of_piece);
      const TileRegisters registers;
      share.work(pieces * thread / threads, pieces * (thread + 1) / threads, blocks_of_piece);
    }
  }
}

void many(const Problem& p) {
  if (p.dtype == Dtype::bf16) amx_rows<Bfloat16, 1>(p);
  else if (p.dtype == Dtype::f16) amx_rows<Half, 2>(p);
  else amx_rows<float, 3>(p);
}

}  // namespace
}  // namespace ISA
