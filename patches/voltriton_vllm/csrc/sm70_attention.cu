// Attention of one new token a sequence over a paged cache (decode), grouped query heads, by splits of the context that a
// second kernel adds up in order.
#include "sm70_common.cuh"

struct Decode {
    const u16* q;            // [B][heads] rows of D halves, strides q_seq, q_head (halves)
    const u8* k;             // cache, byte strides by block, token, head
    const u8* v;
    const int* table;        // [B][table_stride] block numbers
    const int* lengths;      // [B] tokens to attend to, the new one included
    float* part;             // [B][heads][splits][D] sums of exp(score - top) * v
    float* stats;            // [B][heads][splits][2] top (base 2), sum of exp
    u64 k_block, k_token, k_head, v_block, v_token, v_head;
    int q_seq, q_head, heads, group, block_size, table_stride, window;
    float scale;             // softmax scale * key scale * log2(e)
};

DEV void unpack8h(uint4 v, float* f) {
    float2 a = h2f(v.x), b = h2f(v.y), c = h2f(v.z), d = h2f(v.w);
    f[0] = a.x; f[1] = a.y; f[2] = b.x; f[3] = b.y; f[4] = c.x; f[5] = c.y; f[6] = d.x; f[7] = d.y;
}
// Four e4m3 bytes -> floats * 2^-8.
DEV void unpack4e(u32 w, float* f) {
    u32 a = __byte_perm(w, 0, 0x4140), b = __byte_perm(w, 0, 0x4342);
    float2 x = h2f(((a & 0x00800080u) << 8) | ((a & 0x007F007Fu) << 7)), y = h2f(((b & 0x00800080u) << 8) | ((b & 0x007F007Fu) << 7));
    f[0] = x.x; f[1] = x.y; f[2] = y.x; f[3] = y.y;
}
template <bool FP8> struct Raw { uint4 v; };
template <> struct Raw<true> { uint2 v; };
DEV void unpack(Raw<false> r, float* f) { unpack8h(r.v, f); }
DEV void unpack(Raw<true> r, float* f) { unpack4e(r.v.x, f); unpack4e(r.v.y, f + 4); }
DEV Raw<false> load_raw(const u8* p, Raw<false>) { return {ld_stream((const uint4*)p)}; }
DEV Raw<true> load_raw(const u8* p, Raw<true>) { return {__ldg((const uint2*)p)}; }

// G query heads of one key head a block. L lanes hold a key (8 of D each); U keys a lane are loaded together.
template <int D, int G, bool FP8>
DEV void decode_body(const Decode& p)
{
    constexpr int NW = 4, L = D / 8, PER = 32 / L, U = 8, KT = U * PER, LG = 32 / G, BYTES = FP8 ? 8 : 16;
    extern __shared__ float sm[];
    float* sq = sm;                              // [G][D]
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, l = lane % L, sub = lane / L;
    float* sc = sq + G * D + warp * (G * KT + G);  // [G][KT] scores, then weights of this warp's tile
    float* sf = sc + G * KT;                     // [G] factor for what was summed before
    const int split = blockIdx.x, splits = gridDim.x, seq = blockIdx.z;
    const int head0 = blockIdx.y * G, kv = head0 / p.group;
    const int length = p.lengths[seq], first = p.window > 0 ? max(0, length - p.window) : 0;
    const int per_split = ((length - first + splits - 1) / splits + KT - 1) / KT * KT;
    const int begin = first + split * per_split, end = min(length, begin + per_split);
    const int* table = p.table + (size_t)seq * p.table_stride;

    for (int i = tid; i < G * D; i += NW * 32)
        sq[i] = hf(p.q[(size_t)seq * p.q_seq + (size_t)(head0 + i / D) * p.q_head + i % D]) * p.scale * (FP8 ? 256.f : 1.f);
    __syncthreads();

    float acc[G][8], top = -1e30f, sum = 0.f;    // top and sum of head lane / LG
#pragma unroll
    for (int g = 0; g < G; g++)
#pragma unroll
        for (int e = 0; e < 8; e++) acc[g][e] = 0.f;

    // The same number of turns for every warp (it keeps the shuffles cheap); keys past the end get weight 0.
    const int turns = end > begin ? (end - begin + NW * KT - 1) / (NW * KT) : 0;
    for (int turn = 0; turn < turns; turn++) {
        const int tile = begin + (turn * NW + warp) * KT;
        u64 at[U];  // block and slot of each key
        Raw<FP8> raw[U];
#pragma unroll
        for (int u = 0; u < U; u++) {
            int key = min(tile + u * PER + sub, end - 1);
            at[u] = (u64)__ldg(table + key / p.block_size) << 32 | (u32)(key % p.block_size);
        }
#pragma unroll
        for (int u = 0; u < U; u++)
            raw[u] = load_raw(p.k + (at[u] >> 32) * p.k_block + (u32)at[u] * p.k_token + kv * p.k_head + l * BYTES, Raw<FP8>());
        {
            float k[U][8];
#pragma unroll
            for (int u = 0; u < U; u++) unpack(raw[u], k[u]);
            // The values are asked for before the scores are worked out.
#pragma unroll
            for (int u = 0; u < U; u++)
                raw[u] = load_raw(p.v + (at[u] >> 32) * p.v_block + (u32)at[u] * p.v_token + kv * p.v_head + l * BYTES, Raw<FP8>());
#pragma unroll
            for (int g = 0; g < G; g++) {
                float4 qa = *(const float4*)(sq + g * D + l * 8), qb = *(const float4*)(sq + g * D + l * 8 + 4);
                float s[U];
#pragma unroll
                for (int u = 0; u < U; u++)
                    s[u] = qa.x * k[u][0] + qa.y * k[u][1] + qa.z * k[u][2] + qa.w * k[u][3] +
                           qb.x * k[u][4] + qb.y * k[u][5] + qb.z * k[u][6] + qb.w * k[u][7];
                // Sum over the L lanes of a key; each exchange halves the keys a lane is left with.
#pragma unroll
                for (int h = U / 2, o = L / 2; h; h >>= 1, o >>= 1)
#pragma unroll
                    for (int u = 0; u < h; u++) {
                        bool high = l & o;
                        float mine = high ? s[u + h] : s[u], other = high ? s[u] : s[u + h];
                        s[u] = mine + __shfl_xor_sync(~0u, other, o);
                    }
#pragma unroll
                for (int o = L / 16; o; o >>= 1) s[0] += __shfl_xor_sync(~0u, s[0], o);
                int u = l / (L / 8), key = tile + u * PER + sub;
                if (l % (L / 8) == 0) sc[g * KT + u * PER + sub] = key < end ? s[0] : -2e30f;
            }
        }
        __syncwarp();
        {
            int g = lane / LG;
            float t = top, add = 0.f;
            for (int i = lane % LG; i < KT; i += LG) t = fmaxf(t, sc[g * KT + i]);
#pragma unroll
            for (int o = LG / 2; o; o >>= 1) t = fmaxf(t, __shfl_xor_sync(~0u, t, o));
            for (int i = lane % LG; i < KT; i += LG) {
                float w = exp2f(sc[g * KT + i] - t);
                sc[g * KT + i] = w;
                add += w;
            }
            add = warp_sum(add, LG);
            float f = exp2f(top - t);
            sum = sum * f + add;
            top = t;
            if (lane % LG == 0) sf[g] = f;
        }
        __syncwarp();
        float v[U][8];
#pragma unroll
        for (int u = 0; u < U; u++) unpack(raw[u], v[u]);
#pragma unroll
        for (int g = 0; g < G; g++) {
            float f = sf[g];
#pragma unroll
            for (int e = 0; e < 8; e++) acc[g][e] *= f;
#pragma unroll
            for (int u = 0; u < U; u++) {
                float w = sc[g * KT + u * PER + sub];
#pragma unroll
                for (int e = 0; e < 8; e++) acc[g][e] += w * v[u][e];
            }
        }
        __syncwarp();
    }

    // ---- over the keys of a warp, then over the warps in order ----
#pragma unroll
    for (int g = 0; g < G; g++)
#pragma unroll
        for (int e = 0; e < 8; e++)
#pragma unroll
            for (int o = L; o < 32; o <<= 1) acc[g][e] += __shfl_xor_sync(~0u, acc[g][e], o);
    __syncthreads();
    float* so = sm;                 // [NW][G][D]
    float* st = so + NW * G * D;    // [NW][G][2]
    if (sub == 0)
#pragma unroll
        for (int g = 0; g < G; g++)
#pragma unroll
            for (int e = 0; e < 8; e++) so[(warp * G + g) * D + l * 8 + e] = acc[g][e];
    if (lane % LG == 0) {
        st[(warp * G + lane / LG) * 2] = top;
        st[(warp * G + lane / LG) * 2 + 1] = sum;
    }
    __syncthreads();
    for (int i = tid; i < G * D; i += NW * 32) {
        int g = i / D;
        float t = -1e30f, o = 0.f, s = 0.f;
#pragma unroll
        for (int w = 0; w < NW; w++) t = fmaxf(t, st[(w * G + g) * 2]);
#pragma unroll
        for (int w = 0; w < NW; w++) {
            float f = exp2f(st[(w * G + g) * 2] - t);
            o += so[(w * G + g) * D + i % D] * f;
            s += st[(w * G + g) * 2 + 1] * f;
        }
        size_t at = ((size_t)seq * p.heads + head0 + g) * splits + split;
        p.part[at * D + i % D] = o;
        if (i % D == 0) {
            p.stats[at * 2] = t;
            p.stats[at * 2 + 1] = s;
        }
    }
}

// out[seq][head][d] from the splits, in order; grid (heads, sequences), D threads.
extern "C" __global__ void decode_combine(const float* part, const float* stats, u16* out, int heads, int splits, int D,
                                          int out_seq, int out_head, float v_scale)
{
    size_t at = ((size_t)blockIdx.y * heads + blockIdx.x) * splits;
    float t = -1e30f, o = 0.f, s = 0.f;
    for (int i = 0; i < splits; i++) t = fmaxf(t, stats[(at + i) * 2]);
    for (int i = 0; i < splits; i++) {
        float f = exp2f(stats[(at + i) * 2] - t);
        o += part[(at + i) * D + threadIdx.x] * f;
        s += stats[(at + i) * 2 + 1] * f;
    }
    out[(size_t)blockIdx.y * out_seq + (size_t)blockIdx.x * out_head + threadIdx.x] = fh(s > 0.f ? o / s * v_scale : 0.f);
}

#define DECODE(D, G, FP8, OCC)                                                                                          \
    extern "C" __global__ void __launch_bounds__(128, OCC) decode_d##D##_g##G##_f##FP8##_o##OCC(                         \
        const u16* q, const u8* k, const u8* v, const int* table, const int* lengths, float* part, float* stats,        \
        u64 k_block, u64 k_token, u64 k_head, u64 v_block, u64 v_token, u64 v_head, int q_seq, int q_head, int heads,   \
        int group, int block_size, int table_stride, int window, float scale)                                           \
    {                                                                                                                   \
        Decode p = {q, k, v, table, lengths, part, stats, k_block, k_token, k_head, v_block, v_token, v_head, q_seq,    \
                    q_head, heads, group, block_size, table_stride, window, scale};                                     \
        decode_body<D, G, FP8>(p);                                                                                      \
    }
