// Attention of several new tokens a sequence (prefill, chunked or not): causal, keys from the paged cache, online softmax.
// Products on tensor cores, softmax and sums in float32.
#include "sm70_attention.cuh"

struct Prefill {
    const u16* q;            // [tokens][heads] rows of D halves, strides q_token, q_head
    u16* out;                // alike, o_token, o_head
    const u8* k;
    const u8* v;
    const int* table;
    const int* lengths;      // [B] tokens in the cache, the new ones included
    const int* starts;       // [B + 1] first new token of each sequence in q
    u64 k_block, k_token, k_head, v_block, v_token, v_head;
    int q_token, q_head, o_token, o_head, group, block_size, table_stride, window;
    float scale, v_scale;    // softmax scale * key scale * log2(e); value scale
};
#define PK 32       // keys at a time
#define PSP 36      // pitch of the scores, in floats
#define PPP 40      // pitch of the weights, in halves

// A block: 16 new tokens a warp, one head. blockIdx: tile of tokens (the last first: it has most keys), head, sequence.
template <int D, bool FP8, int NW>
DEV void prefill_body(const Prefill& p)
{
    constexpr int DP = D + 8, CH = FP8 ? D / 16 : D / 8, T = NW * 32, U = PK * CH / T, ROWS = NW * 16;
    extern __shared__ uint4 smem[];
    u16* sq = (u16*)smem;                     // [ROWS][DP]
    u16* sk = sq + ROWS * DP;                 // [PK][DP]
    u16* sv = sk + PK * DP;                   // [PK][DP]
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    float* ss = (float*)(sv + PK * DP) + warp * (16 * PSP + 16 * PPP / 2 + 16);  // [16][PSP]
    u16* sp = (u16*)(ss + 16 * PSP);          // [16][PPP]
    float* sf = (float*)(sp + 16 * PPP);      // [16]
    const int seq = blockIdx.z, head = blockIdx.y, kv = head / p.group;
    const int start = p.starts[seq], news = p.starts[seq + 1] - start, length = p.lengths[seq];
    const int tiles = (news + ROWS - 1) / ROWS, tile = tiles - 1 - (int)blockIdx.x;
    if (tile < 0) return;
    const int row0 = tile * ROWS, position0 = length - news + row0;  // of the block's first token
    const int last = min(length, position0 + ROWS);                  // keys that any of its tokens sees
    const int first = p.window > 0 ? max(0, position0 - p.window + 1) / PK * PK : 0;
    const int* table = p.table + (size_t)seq * p.table_stride;

    for (int i = tid; i < ROWS * (D / 8); i += T) {
        int r = i / (D / 8), c = i % (D / 8);
        const uint4* from = (const uint4*)(p.q + (size_t)(start + row0 + r) * p.q_token + (size_t)head * p.q_head);
        *(uint4*)(sq + r * DP + c * 8) = row0 + r < news ? from[c] : make_uint4(0, 0, 0, 0);
    }
    for (int i = lane; i < 256; i += 32) ss[(i >> 4) * PSP + (i & 15)] = (float)(i >> 4);
    __syncwarp();
    int row[8];
    {
        float c[8];
        wmma_load_c(c, ss, PSP);
#pragma unroll
        for (int e = 0; e < 8; e++) row[e] = (int)c[e];
    }
    float o[D / 16][8], top = -1e30f, sum = 0.f;  // top and sum: token lane / 2 of the warp
#pragma unroll
    for (int i = 0; i < D / 16; i++)
#pragma unroll
        for (int e = 0; e < 8; e++) o[i][e] = 0.f;

    uint4 rk[U], rv[U];
    auto fetch = [&](int key0) {
#pragma unroll
        for (int u = 0; u < U; u++) {
            int i = u * T + tid, key = min(key0 + i / CH, last - 1);
            u64 block = __ldg(table + key / p.block_size), slot = key % p.block_size;
            rk[u] = __ldg((const uint4*)(p.k + block * p.k_block + slot * p.k_token + kv * p.k_head) + i % CH);
            rv[u] = __ldg((const uint4*)(p.v + block * p.v_block + slot * p.v_token + kv * p.v_head) + i % CH);
        }
    };
    auto put = [&](u16* to_tile, const uint4 (&raw)[U]) {
#pragma unroll
        for (int u = 0; u < U; u++) {
            int i = u * T + tid;
            uint4* to = (uint4*)(to_tile + i / CH * DP) + i % CH * (FP8 ? 2 : 1);
            if (FP8) {
                uint2 a = half4(raw[u].x), b = half4(raw[u].y), c = half4(raw[u].z), d = half4(raw[u].w);
                to[0] = make_uint4(a.x, a.y, b.x, b.y);
                to[1] = make_uint4(c.x, c.y, d.x, d.y);
            } else {
                to[0] = raw[u];
            }
        }
    };
    const int my_last = position0 + warp * 16 + 15;  // the last key that this warp's tokens see
    fetch(first);
    for (int key0 = first; key0 < last; key0 += PK) {
        __syncthreads();
        put(sk, rk);
        put(sv, rv);
        __syncthreads();
        if (key0 + PK < last) fetch(key0 + PK);
        if (key0 > my_last) continue;  // the same for a whole warp
        float s[2][8];
#pragma unroll
        for (int e = 0; e < 8; e++) s[0][e] = s[1][e] = 0.f;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            u32 a[8], b[8];
            wmma_a(a, sq + warp * 16 * DP + i * 16, DP);
            wmma_b_col(b, sk + i * 16, DP);
            wmma_mma(s[0], a, b);
            wmma_b_col(b, sk + 16 * DP + i * 16, DP);
            wmma_mma(s[1], a, b);
        }
        wmma_store_c(ss, s[0], PSP);
        wmma_store_c(ss + 16, s[1], PSP);
        __syncwarp();
        {
            const int r = lane >> 1, k0 = (lane & 1) * 16, position = position0 + warp * 16 + r;
            const int lowest = p.window > 0 ? position - p.window + 1 : 0;
            float w[16], t = top, add = 0.f;
#pragma unroll
            for (int e = 0; e < 16; e++) {
                int key = key0 + k0 + e;
                w[e] = key <= position && key >= lowest && key < last ? ss[r * PSP + k0 + e] * p.scale : -2e30f;
                t = fmaxf(t, w[e]);
            }
            t = fmaxf(t, __shfl_xor_sync(~0u, t, 1));
#pragma unroll
            for (int e = 0; e < 16; e++) {
                w[e] = exp2f(w[e] - t);
                add += w[e];
            }
            uint4* to = (uint4*)(sp + r * PPP + k0);
            to[0] = make_uint4(fh2(w[0], w[1]), fh2(w[2], w[3]), fh2(w[4], w[5]), fh2(w[6], w[7]));
            to[1] = make_uint4(fh2(w[8], w[9]), fh2(w[10], w[11]), fh2(w[12], w[13]), fh2(w[14], w[15]));
            add += __shfl_xor_sync(~0u, add, 1);
            float f = exp2f(top - t);
            sum = sum * f + add;
            top = t;
            if (!(lane & 1)) sf[r] = f;
        }
        __syncwarp();
        float f[8];
#pragma unroll
        for (int e = 0; e < 8; e++) f[e] = sf[row[e]];
        u32 a0[8], a1[8];
        wmma_a(a0, sp, PPP);
        wmma_a(a1, sp + 16, PPP);
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            u32 b[8];
#pragma unroll
            for (int e = 0; e < 8; e++) o[i][e] *= f[e];
            wmma_b_row(b, sv + i * 16, DP);
            wmma_mma_row(o[i], a0, b);
            wmma_b_row(b, sv + 16 * DP + i * 16, DP);
            wmma_mma_row(o[i], a1, b);
        }
        __syncwarp();
    }
    // The sums leave through the warp's part of the scores, 16 columns at a time.
    if (!(lane & 1)) sf[lane >> 1] = sum > 0.f ? p.v_scale / sum : 0.f;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        wmma_store_c(ss, o[i], PSP);
        __syncwarp();
        int r = lane >> 1, c0 = (lane & 1) * 8, token = row0 + warp * 16 + r;
        const float* v = ss + r * PSP + c0;
        float f = sf[r];
        if (token < news)
            *(uint4*)(p.out + (size_t)(start + token) * p.o_token + (size_t)head * p.o_head + i * 16 + c0) =
                make_uint4(fh2(v[0] * f, v[1] * f), fh2(v[2] * f, v[3] * f), fh2(v[4] * f, v[5] * f), fh2(v[6] * f, v[7] * f));
        __syncwarp();
    }
}
#define PREFILL(D, FP8, NW, OCC)                                                                                        \
    extern "C" __global__ void __launch_bounds__(NW * 32, OCC) prefill_d##D##_f##FP8##_nw##NW##_o##OCC(                  \
        const u16* q, u16* out, const u8* k, const u8* v, const int* table, const int* lengths, const int* starts,      \
        u64 k_block, u64 k_token, u64 k_head, u64 v_block, u64 v_token, u64 v_head, int q_token, int q_head,            \
        int o_token, int o_head, int group, int block_size, int table_stride, int window, float scale, float v_scale)   \
    {                                                                                                                   \
        Prefill p = {q, out, k, v, table, lengths, starts, k_block, k_token, k_head, v_block, v_token, v_head, q_token, \
                     q_head, o_token, o_head, group, block_size, table_stride, window, scale, v_scale};                 \
        prefill_body<D, FP8, NW>(p);                                                                                    \
    }
