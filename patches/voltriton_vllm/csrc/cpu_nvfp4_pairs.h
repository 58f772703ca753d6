// Weights (times block scale) as pairs of bfloat16: e2m1 times E4M3 has at most 6 significant bits, so this is exact.
#pragma once
#include "cpu_nvfp4_vector.h"

namespace ISA {
namespace {

// A magnitude of E4M3, times 2^-8, is a fraction 8/8 to 15/8 and a power of two from 2^-17 to 2^0. Its products with
// magnitudes of e2m1 are looked up by fraction and code as bfloat16, then the exponent, how many times it is halved, is
// subtracted from their bits. Saturation keeps zeros zero.
struct PairTables {
  uint16_t products[64];   // [fraction - 8][e2m1]; each increased by its index's upper bits, which `halvings` contain
  uint16_t halvings[128];  // [E4M3]: at the exponent's place of bfloat16, fraction - 8 in bits 3 to 5; of 0 the largest
  constexpr PairTables() : products(), halvings() {
    constexpr int doubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    for (int i = 0; i < 64; i++) {
      int product = (8 + i / 8) * doubled[i % 8], exponent = 127 + 3;  // in 16ths, below 256
      if (product == 0) continue;
      for (; product < 128; product *= 2) exponent--;
      products[i] = uint16_t((exponent << 7 | (product & 127)) + (i & 56));
    }
    halvings[0] = 0xffff;
    for (int i = 1; i < 128; i++) {
      int fraction = i < 8 ? i : 8 + i % 8, halved = i < 8 ? 14 : 15 - i / 8;
      for (; fraction < 8; fraction *= 2) halved++;
      halvings[i] = uint16_t(halved << 7 | (fraction - 8) << 3);
    }
  }
};
alignas(64) constexpr PairTables kPairTables;

inline __m512i look_up(const uint16_t* table, __m512i at) {  // by the low 6 bits
  return _mm512_permutex2var_epi16(_mm512_load_si512(table), at, _mm512_load_si512(table + 32));
}

struct PairDecoder {  // of a group of 16 rows
  __m512i halvings, negative;

  explicit PairDecoder(const uint8_t* scale) {
    const __m512i bytes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)scale));
    const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaa, bytes, _mm512_slli_epi32(bytes, 16));
    const __m512i small = look_up(kPairTables.halvings, both), large = look_up(kPairTables.halvings + 64, both);
    halvings = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(both, _mm512_set1_epi16(0x40)), small, large);
    negative = _mm512_and_si512(_mm512_srai_epi32(bytes, 31), _mm512_set1_epi32(int(0x88888888u)));
  }

  // A word of each row -> four vectors, `stride` apart, of pairs of columns, the even one in the low half.
  void word(const uint32_t* words, float* out, int64_t stride) const {
    const __m512i codes = _mm512_xor_si512(_mm512_loadu_si512(words), negative);
    const __m512i sign = _mm512_set1_epi16(-0x8000), magnitude = _mm512_set1_epi16(7);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++, out += stride) {
      // (codes & 7) | halvings; (product - halvings) | (codes & sign)
      const __m512i at = _mm512_ternarylogic_epi32(_mm512_srli_epi32(codes, 4 * j), magnitude, halvings, 0xea);
      const __m512i product = _mm512_subs_epu16(look_up(kPairTables.products, at), halvings);
      const __m512i signs = _mm512_slli_epi32(codes, 12 - 4 * j);
      _mm512_storeu_si512(out, _mm512_ternarylogic_epi32(product, signs, sign, 0xf8));
    }
  }
};

}  // namespace
}  // namespace ISA
