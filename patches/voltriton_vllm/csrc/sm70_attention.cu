// Attention of one new token a sequence over a paged cache (decode), grouped query heads, by splits of the context that a
// second kernel adds up in order. Products on tensor cores, softmax and sums in float32.
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

DEV void wmma_a(u32 (&f)[8], const u16* p, int ld) {
    asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%0,%1,%2,%3,%4,%5,%6,%7},[%8],%9;"
        : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]), "=r"(f[4]), "=r"(f[5]), "=r"(f[6]), "=r"(f[7])
        : "r"((u32)__cvta_generic_to_shared(p)), "r"(ld) : "memory");
}
#define WMMA_B(NAME, LAYOUT)                                                                                            \
    DEV void NAME(u32 (&f)[8], const u16* p, int ld) {                                                                  \
        asm volatile("wmma.load.b.sync.aligned." LAYOUT ".m16n16k16.shared.f16 {%0,%1,%2,%3,%4,%5,%6,%7},[%8],%9;"      \
            : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]), "=r"(f[4]), "=r"(f[5]), "=r"(f[6]), "=r"(f[7])            \
            : "r"((u32)__cvta_generic_to_shared(p)), "r"(ld) : "memory");                                               \
    }
WMMA_B(wmma_b_col, "col")
WMMA_B(wmma_b_row, "row")
#define WMMA_MMA(NAME, LAYOUT)                                                                                          \
    DEV void NAME(float (&c)[8], const u32 (&a)[8], const u32 (&b)[8]) {                                                \
        asm volatile("wmma.mma.sync.aligned.row." LAYOUT ".m16n16k16.f32.f32 {%0,%1,%2,%3,%4,%5,%6,%7},"                \
            "{%8,%9,%10,%11,%12,%13,%14,%15},{%16,%17,%18,%19,%20,%21,%22,%23},{%0,%1,%2,%3,%4,%5,%6,%7};"              \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])            \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]),                   \
              "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]));                  \
    }
WMMA_MMA(wmma_mma_col, "col")
WMMA_MMA(wmma_mma_row, "row")
DEV void wmma_store_c(float* p, const float (&c)[8], int ld) {
    asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%0],{%1,%2,%3,%4,%5,%6,%7,%8},%9;"
        :: "r"((u32)__cvta_generic_to_shared(p)), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]), "f"(c[4]), "f"(c[5]),
           "f"(c[6]), "f"(c[7]), "r"(ld) : "memory");
}
DEV void wmma_load_c(float (&c)[8], const float* p, int ld) {
    asm volatile("wmma.load.c.sync.aligned.row.m16n16k16.shared.f32 {%0,%1,%2,%3,%4,%5,%6,%7},[%8],%9;"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]), "=f"(c[4]), "=f"(c[5]), "=f"(c[6]), "=f"(c[7])
        : "r"((u32)__cvta_generic_to_shared(p)), "r"(ld) : "memory");
}
// Four e4m3 bytes -> four halves * 2^-8, exact.
DEV uint2 half4(u32 w) {
    u32 a = __byte_perm(w, 0, 0x4140), b = __byte_perm(w, 0, 0x4342);
    return make_uint2(((a & 0x00800080u) << 8) | ((a & 0x007F007Fu) << 7), ((b & 0x00800080u) << 8) | ((b & 0x007F007Fu) << 7));
}

#define TK 16       // keys a warp takes at a time
#define SP 20       // pitch of the scores, in floats
#define PP 24       // pitch of the weights, in halves

// A block: up to 16 query heads of one key head, one split of the context; its NW warps take tiles of 16 keys in turn.
// Tensor cores do both products, through shared memory and wmma alone, so nothing depends on how a device lays out
// fragments: which row of the sum an element belongs to is found by loading a matrix of row numbers.
template <int D, bool FP8, int NW>
DEV void decode_body(const Decode& p)
{
    constexpr int DP = D + 8, CH = FP8 ? D / 16 : D / 8, U = TK * CH / 32;  // 16-byte pieces of a key, and of a tile a lane
    constexpr int WARP_BYTES = TK * DP * 2 + 16 * SP * 4 + 16 * PP * 2 + 16 * 4 + TK * 16;
    extern __shared__ uint4 smem[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    u16* sq = (u16*)smem;                                               // [16][DP] query heads, zeros below
    u8* mine = (u8*)smem + 16 * DP * 2 + warp * WARP_BYTES;
    u16* tile = (u16*)mine;                                             // [TK][DP] keys, then values
    float* ss = (float*)(mine + TK * DP * 2);                           // [16][SP] scores
    u16* sp = (u16*)(mine + TK * DP * 2 + 16 * SP * 4);                 // [16][PP] weights
    float* sf = (float*)(mine + TK * DP * 2 + 16 * SP * 4 + 16 * PP * 2);  // [16] factor for what was summed before
    u64* at = (u64*)(mine + TK * DP * 2 + 16 * SP * 4 + 16 * PP * 2 + 64);  // [TK][2] where key and value are

    const int split = blockIdx.x, splits = gridDim.x, seq = blockIdx.z, chunks = (p.group + 15) / 16;
    const int kv = blockIdx.y / chunks, head0 = kv * p.group + blockIdx.y % chunks * 16;
    const int heads = min(16, (kv + 1) * p.group - head0);
    const int length = p.lengths[seq], first = p.window > 0 ? max(0, length - p.window) : 0;
    const int per_split = ((length - first + splits - 1) / splits + TK - 1) / TK * TK;
    const int begin = first + split * per_split, end = min(length, begin + per_split);
    const int turns = end > begin ? (end - begin + NW * TK - 1) / (NW * TK) : 0;
    const int* table = p.table + (size_t)seq * p.table_stride;

    for (int i = tid; i < 16 * (D / 8); i += NW * 32) {
        int h = i / (D / 8);
        const uint4* from = (const uint4*)(p.q + (size_t)seq * p.q_seq + (size_t)(head0 + h) * p.q_head);
        *(uint4*)(sq + h * DP + i % (D / 8) * 8) = h < heads ? from[i % (D / 8)] : make_uint4(0, 0, 0, 0);
    }
    for (int i = lane; i < 256; i += 32) ss[(i >> 4) * SP + (i & 15)] = (float)(i >> 4);
    __syncthreads();
    int row[8];
    {
        float c[8];
        wmma_load_c(c, ss, SP);
#pragma unroll
        for (int e = 0; e < 8; e++) row[e] = (int)c[e];
    }
    float o[D / 16][8], top = -1e30f, sum = 0.f;  // top and sum: head lane / 2
#pragma unroll
    for (int i = 0; i < D / 16; i++)
#pragma unroll
        for (int e = 0; e < 8; e++) o[i][e] = 0.f;

    auto block_of = [&](int turn) {  // of key lane % 16 of a tile
        int key = min(begin + (turn * NW + warp) * TK + (lane & 15), end - 1);
        return __ldg(table + key / p.block_size);
    };
    auto place = [&](int turn, int block) {
        int key = min(begin + (turn * NW + warp) * TK + (lane & 15), end - 1), slot = key % p.block_size;
        if (lane < 16) at[lane * 2] = (u64)block * p.k_block + (u64)slot * p.k_token + kv * p.k_head;
        else at[(lane - 16) * 2 + 1] = (u64)block * p.v_block + (u64)slot * p.v_token + kv * p.v_head;
    };
    uint4 raw[U];
    auto fetch = [&](const u8* cache, int which) {
#pragma unroll
        for (int u = 0; u < U; u++) {
            int i = u * 32 + lane;
            raw[u] = ld_stream((const uint4*)(cache + at[i / CH * 2 + which]) + i % CH);
        }
    };
    auto put = [&]() {
#pragma unroll
        for (int u = 0; u < U; u++) {
            int i = u * 32 + lane;
            uint4* to = (uint4*)(tile + i / CH * DP) + i % CH * (FP8 ? 2 : 1);
            if (FP8) {
                uint2 a = half4(raw[u].x), b = half4(raw[u].y), c = half4(raw[u].z), d = half4(raw[u].w);
                to[0] = make_uint4(a.x, a.y, b.x, b.y);
                to[1] = make_uint4(c.x, c.y, d.x, d.y);
            } else {
                to[0] = raw[u];
            }
        }
    };

    int block = 0;
    if (turns) {
        place(0, block_of(0));
        __syncwarp();
        fetch(p.k, 0);
        if (turns > 1) block = block_of(1);
    }
    for (int turn = 0; turn < turns; turn++) {
        put();  // keys
        fetch(p.v, 1);
        __syncwarp();
        {
            float s[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                u32 a[8], b[8];
                wmma_a(a, sq + i * 16, DP);
                wmma_b_col(b, tile + i * 16, DP);
                wmma_mma_col(s, a, b);
            }
            wmma_store_c(ss, s, SP);
        }
        __syncwarp();
        {
            const int h = lane >> 1, k0 = (lane & 1) * 8, key0 = begin + (turn * NW + warp) * TK + k0;
            float w[8], t = top, add = 0.f;
#pragma unroll
            for (int e = 0; e < 8; e++) {
                w[e] = key0 + e < end ? ss[h * SP + k0 + e] * p.scale : -2e30f;
                t = fmaxf(t, w[e]);
            }
            t = fmaxf(t, __shfl_xor_sync(~0u, t, 1));
#pragma unroll
            for (int e = 0; e < 8; e++) {
                w[e] = exp2f(w[e] - t);
                add += w[e];
            }
            *(uint4*)(sp + h * PP + k0) = make_uint4(fh2(w[0], w[1]), fh2(w[2], w[3]), fh2(w[4], w[5]), fh2(w[6], w[7]));
            add += __shfl_xor_sync(~0u, add, 1);
            float f = exp2f(top - t);
            sum = sum * f + add;
            top = t;
            if (!(lane & 1)) sf[h] = f;
        }
        put();  // values, over the keys
        if (turn + 1 < turns) {
            __syncwarp();  // all lanes have used `at`
            place(turn + 1, block);
            __syncwarp();
            fetch(p.k, 0);
            if (turn + 2 < turns) block = block_of(turn + 2);
        }
        __syncwarp();
        float f[8];
#pragma unroll
        for (int e = 0; e < 8; e++) f[e] = sf[row[e]];
        u32 a[8];
        wmma_a(a, sp, PP);
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            u32 b[8];
            wmma_b_row(b, tile + i * 16, DP);
#pragma unroll
            for (int e = 0; e < 8; e++) o[i][e] *= f[e];
            wmma_mma_row(o[i], a, b);
        }
        __syncwarp();
    }

    // ---- over the warps, in order ----
    __syncthreads();
    float* so = (float*)smem;        // [NW][16][D]
    float* st = so + NW * 16 * D;    // [NW][16][2]
#pragma unroll
    for (int i = 0; i < D / 16; i++) wmma_store_c(so + warp * 16 * D + i * 16, o[i], D);
    if (!(lane & 1)) {
        st[(warp * 16 + (lane >> 1)) * 2] = top;
        st[(warp * 16 + (lane >> 1)) * 2 + 1] = sum;
    }
    __syncthreads();
    for (int i = tid; i < heads * D; i += NW * 32) {
        int h = i / D;
        float t = -1e30f, v = 0.f, s = 0.f;
#pragma unroll
        for (int w = 0; w < NW; w++) t = fmaxf(t, st[(w * 16 + h) * 2]);
#pragma unroll
        for (int w = 0; w < NW; w++) {
            float f = exp2f(st[(w * 16 + h) * 2] - t);
            v += so[(w * 16 + h) * D + i % D] * f;
            s += st[(w * 16 + h) * 2 + 1] * f;
        }
        size_t to = ((size_t)seq * p.heads + head0 + h) * splits + split;
        p.part[to * D + i % D] = v;
        if (i % D == 0) {
            p.stats[to * 2] = t;
            p.stats[to * 2 + 1] = s;
        }
    }
}

// out[seq][head][d] from the splits, in order; grid (heads, sequences), D threads, shared memory splits + 1 floats.
extern "C" __global__ void __launch_bounds__(256) decode_combine(
    const float* part, const float* stats, u16* out, int heads, int splits, int D, int out_seq, int out_head, float v_scale)
{
    extern __shared__ float factor[];
    const size_t at = ((size_t)blockIdx.y * heads + blockIdx.x) * splits;
    if (threadIdx.x < 32) {  // splits are at most 64: two a lane
        const int i = threadIdx.x, j = i + 32;
        const float2 none = make_float2(-1e30f, 0.f), a = i < splits ? *(const float2*)(stats + (at + i) * 2) : none;
        const float2 b = j < splits ? *(const float2*)(stats + (at + j) * 2) : none;
        float t = fmaxf(a.x, b.x);
        for (int o = 16; o; o >>= 1) t = fmaxf(t, __shfl_xor_sync(~0u, t, o));
        const float fa = exp2f(a.x - t), fb = exp2f(b.x - t), s = warp_sum(a.y * fa + b.y * fb, 32);
        if (i < splits) factor[i] = fa;
        if (j < splits) factor[j] = fb;
        if (!i) factor[splits] = s > 0.f ? v_scale / s : 0.f;
    }
    __syncthreads();
    float o = 0.f;
#pragma unroll 16
    for (int i = 0; i < splits; i++) o += __ldg(part + (at + i) * D + threadIdx.x) * factor[i];
    out[(size_t)blockIdx.y * out_seq + (size_t)blockIdx.x * out_head + threadIdx.x] = fh(o * factor[splits]);
}

#define DECODE(D, FP8, NW, OCC)                                                                                         \
    extern "C" __global__ void __launch_bounds__(NW * 32, OCC) decode_d##D##_f##FP8##_nw##NW##_o##OCC(                   \
        const u16* q, const u8* k, const u8* v, const int* table, const int* lengths, float* part, float* stats,        \
        u64 k_block, u64 k_token, u64 k_head, u64 v_block, u64 v_token, u64 v_head, int q_seq, int q_head, int heads,   \
        int group, int block_size, int table_stride, int window, float scale)                                           \
    {                                                                                                                   \
        Decode p = {q, k, v, table, lengths, part, stats, k_block, k_token, k_head, v_block, v_token, v_head, q_seq,    \
                    q_head, heads, group, block_size, table_stride, window, scale};                                     \
        decode_body<D, FP8, NW>(p);                                                                                     \
    }

// ---- several new tokens a sequence (prefill, chunked or not): causal, keys from the paged cache ----
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
            wmma_mma_col(s[0], a, b);
            wmma_b_col(b, sk + 16 * DP + i * 16, DP);
            wmma_mma_col(s[1], a, b);
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
