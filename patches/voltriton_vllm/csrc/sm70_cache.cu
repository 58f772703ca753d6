// New keys and values into a paged cache of e4m3 bytes.
#include "sm70_common.cuh"

// To the nearest e4m3 value, ties to even, beyond +-448 to that; NaN stays NaN.
DEV u32 to_e4m3(float x) {
    const u32 bits = __float_as_int(x), sign = (bits >> 24) & 0x80u;
    u32 magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return sign | 0x7Fu;
    magnitude = min(magnitude, 0x43E00000u);  // 448
    if (magnitude < 0x3C800000u)              // 2^-6: below it are multiples of 2^-9, of which eight make 2^-6
        return sign | (u32)__float2int_rn(__int_as_float(magnitude) * 512.f);
    magnitude += 0x7FFFFu + ((magnitude >> 20) & 1u);
    return sign | ((magnitude >> 20) - (120u << 3));  // the exponent's bias: 127 -> 7
}
DEV u32 to_e4m3_4(uint2 halves, float factor) {
    const float2 a = h2f(halves.x), b = h2f(halves.y);
    return to_e4m3(a.x * factor) | to_e4m3(a.y * factor) << 8 | to_e4m3(b.x * factor) << 16 | to_e4m3(b.y * factor) << 24;
}

// A block is a token, blockIdx.y 0 its keys, 1 its values; slots[token] = block * block_size + place, negative: nowhere.
// Strides of the cache in bytes, of key and value in halves; D a multiple of 8.
extern "C" __global__ void __launch_bounds__(128) write_cache(
    const u16* key, const u16* value, u8* key_cache, u8* value_cache, const u64* slots, int k_block, int k_token,
    int k_head, int v_block, int v_token, int v_head, int key_stride, int key_head_stride, int value_stride,
    int value_head_stride, int heads, int D, int block_size, float k_factor, float v_factor)
{
    const long long slot = slots[blockIdx.x];
    if (slot < 0) return;
    const bool second = blockIdx.y;
    const long long page = slot / block_size, place = slot % block_size;
    const u16* from = second ? value + (size_t)blockIdx.x * value_stride : key + (size_t)blockIdx.x * key_stride;
    u8* to = second ? value_cache + page * v_block + place * v_token : key_cache + page * k_block + place * k_token;
    const int head_from = second ? value_head_stride : key_head_stride, head_to = second ? v_head : k_head;
    const float factor = second ? v_factor : k_factor;
    for (int i = threadIdx.x; i < heads * D / 8; i += 128) {
        const int head = i / (D / 8), at = i % (D / 8);
        const uint4 v = *((const uint4*)(from + head * head_from) + at);
        *((uint2*)(to + head * head_to) + at) =
            make_uint2(to_e4m3_4(make_uint2(v.x, v.y), factor), to_e4m3_4(make_uint2(v.z, v.w), factor));
    }
}
